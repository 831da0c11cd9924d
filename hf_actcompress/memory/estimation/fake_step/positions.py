"""The longest sequence of a model whose positions are a learned table."""

from __future__ import annotations

from typing import Any

from torch import nn

from ....errors import ModelConfigError
from ....models.root import root_module

# parts of the names of position tables; GPT-2's is `wpe`
_NAMES = ("position", "pos_emb", "wpe")
# rows of the table that are no positions: in fairseq's models positions start after the padding token
_OFFSET = 2


def check_length(model: nn.Module, seq_len: int) -> None:
    """Raise ModelConfigError if the model has learned positions, and fewer of them than `seq_len`."""
    root: Any = root_module(model)
    if getattr(root, "main_input_name", "input_ids") != "input_ids" or not hasattr(root, "config"):
        return
    most = _positions(root)
    if most is not None and seq_len > most:
        raise ModelConfigError(
            f"{type(root).__name__} has learned positions for {most:,} tokens, and {seq_len:,} were asked for; "
            "shorten the sequences"
        )


def _positions(model: Any) -> int | None:
    config = model.config.get_text_config()
    stated = getattr(config, "max_position_embeddings", None)
    if not isinstance(stated, int):
        return None
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        table = isinstance(module, nn.Embedding) and any(part in last for part in _NAMES) and "relative" not in name
        if table and stated <= module.num_embeddings <= stated + _OFFSET:
            before = 0 if module.padding_idx is None else module.padding_idx + 1
            return int(min(stated, module.num_embeddings - before))
    return None
