"""What a user can still turn off, with the bytes that it takes for this model and batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ...models.root import root_of
from ...roles import Role
from .report import Advice
from .saved_tensors import SavedTensor, SavedTensors

Run = Callable[..., SavedTensors]
_OF_ATTENTION = (Role.ATTENTION, Role.IN_PARTS)


def advise(
    model: nn.Module, batch: dict[str, Any], seen: SavedTensors, roles: dict[str, Role], run: Run
) -> tuple[Advice, ...]:
    """Every row that applies, largest first.

    Args:
        model: As it was when the report was asked for: stock or patched.
        batch: What the forward gets.
        seen: What its forward kept.
        roles: Role of each module, by name.
        run: Runs the model's forward again with other keyword arguments.
    """
    sources = (
        _cache(model, batch, seen, run),
        _attention(model, seen, roles),
        _adapters(model, seen),
        _logits(model, seen),
        _functional_dropout(model, seen),
    )
    rows = [row for source in sources for row in source if row.bytes > 0]
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def _config(model: nn.Module) -> Any:
    return getattr(model, "config", None)


def _cache(model: nn.Module, batch: dict[str, Any], seen: SavedTensors, run: Run) -> Iterator[Advice]:
    """The bytes of the k and v cache, measured by a forward without it."""
    if not getattr(_config(model), "use_cache", False) or batch.get("use_cache") is False:
        return
    yield Advice(
        "use_cache=True in training keeps copies of k and v",
        seen.total - run(use_cache=False).total,
        "set model.config.use_cache = False (or pass use_cache=False) while training",
    )


def _attention(model: nn.Module, seen: SavedTensors, roles: dict[str, Role]) -> Iterator[Advice]:
    """Square tensors [B, heads, S, S] saved in attention modules. A mask has a storage of B S S elements, saved
    neither by dropout nor by softmax; the others are probabilities.
    """
    width = _head_width(model)
    inside = [t for t in seen.tensors if roles[t.module] in _OF_ATTENTION and _is_square(t, width)]
    eager = getattr(_config(model), "_attn_implementation", None) == "eager"
    masks = [t for t in inside if not t.call and t.nbytes == t.dtype.itemsize * t.shape[0] * t.shape[2] * t.shape[3]]
    if len(masks) > 1 and not eager:
        # one mask for all layers is enough
        yield Advice(
            "each layer keeps a copy of the padding mask",
            sum(t.nbytes for t in masks) - max(t.nbytes for t in masks),
            "call patch_model, which keeps one for all layers, or drop the attention_mask where nothing is padded",
        )
    yield Advice(
        "attention keeps its probabilities, of size sequence x sequence per head",
        sum(t.nbytes for t in inside if t not in masks),
        'call patch_model, or load the model with attn_implementation="sdpa"'
        if eager
        else "call patch_model, or set the attention dropout to 0 (with dropout a CPU's sdpa keeps them)",
    )


def _head_width(model: nn.Module) -> int:
    config = _config(model)
    width = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    heads = getattr(config, "num_attention_heads", None)
    return width or (getattr(config, "hidden_size", 0) // heads if heads else 0)


def _is_square(tensor: SavedTensor, head_width: int) -> bool:
    """Whether the last two of four dimensions are positions. If the head width equals the sequence length, the shape
    does not tell; then a tensor counts as square only if dropout or softmax saved it."""
    return (
        len(tensor.shape) == 4
        and tensor.shape[2] == tensor.shape[3]
        and (tensor.shape[3] != head_width or tensor.call != "")
    )


def _adapters(model: nn.Module, seen: SavedTensors) -> Iterator[Advice]:
    """Copies of activations in the adapters' wider dtype, saved while a tuner layer or a part of it runs."""
    tuners = {name: m for name, m in model.named_modules() if hasattr(m, "_cast_input_dtype")}
    wide: dict[str, torch.dtype] = {}
    for name, tuner in tuners.items():
        base = next((p.dtype for n, p in tuner.named_parameters() if n.startswith("base_layer.")), None)
        adapter = next((p.dtype for n, p in tuner.named_parameters() if ".lora_A." in f".{n}"), None)
        if base is not None and adapter is not None and adapter.itemsize > base.itemsize:
            wide[f"{name}."] = adapter
    copies = [t for t in seen.tensors if any(f"{t.module}.".startswith(n) and t.dtype == d for n, d in wide.items())]
    narrow = "get_peft_model(..., autocast_adapter_dtype=False)"
    yield Advice(
        "adapters in fp32 keep their inputs and low-rank activations in fp32",
        sum(t.nbytes for t in copies),
        narrow if root_of(model) is not None else f"call patch_model, which keeps no copy of the inputs, or {narrow}",
    )


def _logits(model: nn.Module, seen: SavedTensors) -> Iterator[Advice]:
    """A language model's logits [B, S, vocabulary], if only the outputs hold them and the graph does not."""
    vocabulary = getattr(_config(model), "vocab_size", None)
    if seen.logits_shape and len(seen.logits_shape) == 3 and seen.logits_shape[-1] == vocabulary:
        yield Advice(
            "outputs.logits, alive as long as the outputs are",
            seen.logits,
            "patch_model(model), which computes them when something reads them, or drop the outputs before backward",
        )


def _functional_dropout(model: nn.Module, seen: SavedTensors) -> Iterator[Advice]:
    """Masks of dropout that is called as a function. uint8 masks are left out: the net has packed these into bits."""
    modules = dict(model.named_modules())
    masks = [
        t
        for t in seen.tensors
        if t.call == "dropout"
        and t.dtype != torch.uint8
        and not isinstance(modules[t.module], nn.Dropout)
        and not _is_square(t, _head_width(model))
    ]
    yield Advice(
        "dropout called as a function keeps its masks",
        sum(t.nbytes for t in masks),
        "patch_model keeps them as bits, where it is not told net=False",
    )
