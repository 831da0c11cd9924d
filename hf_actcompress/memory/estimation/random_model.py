"""A real model with random weights made from a config, to measure what it keeps where nothing can be downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ModelConfigError
from ...models.adapters import with_lora
from ...private_apis import FakeTensorMode
from ...quick.sizes import readable_size
from .checks import refuse_diffusion
from .fake_step.batch import fake_batch
from .fake_step.setting import Setting
from .meta_model import dtype_of, skeleton

# names under which configs hold their number of layers
_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
)


def local_model(
    source: Any,
    dtype: torch.dtype | str | None = None,
    *,
    lora: Any = None,
    gradient_checkpointing: bool = False,
    layers: int | None = None,
    most_bytes: int | None = None,
) -> nn.Module:
    """The model that `source` stands for, with random weights, on the CPU, in train mode.

    Args:
        source, dtype, lora, gradient_checkpointing: As for `estimate` (`source` is its `model`).
        layers: How many layers the model gets; by default as many as the config says.
        most_bytes: Raise an error if weights and gradients take more than half of this.

    Raises:
        ModelConfigError: There is no config or no model for it, the model is too large, or the layers of the config
            cannot be counted.
        MissingExtraError: LoRA was asked for and peft is not installed.
    """
    refuse_diffusion(source)
    modules: Any = skeleton(source, dtype_of(dtype), None, gradient_checkpointing)
    if layers is None:
        _check_room(str(source), modules, most_bytes)
    config = modules.config if layers is None else _shortened(modules.config, layers)
    weights = next(modules.parameters()).dtype
    model: Any = type(modules)._from_config(config, dtype=weights)
    if lora is not None and lora is not False:
        model = with_lora(model, lora)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable()
    trained: nn.Module = model.train()
    return trained


def random_batch(model: nn.Module, batch_size: int, seq_len: int) -> dict[str, Tensor]:
    """Inputs and labels for a model on the CPU, without padding.

    Args:
        model: A model made by `local_model`.
        batch_size, seq_len: Sequences, and tokens per sequence; for images seq_len is ignored.

    Raises:
        ModelConfigError: The model takes other inputs, or does not take sequences of this length.
    """
    outer: Any = model
    config = outer.config
    longest = getattr(config, "max_position_embeddings", None) or seq_len
    if seq_len > longest:
        raise ModelConfigError(f"{type(outer).__name__} has {longest} positions; asked for {seq_len}")
    shapes = fake_batch(model, Setting(batch_size, seq_len, None, False), FakeTensorMode(), text_only=True)
    vocabulary = getattr(config.get_text_config(), "vocab_size", 2)

    def drawn(name: str, x: Tensor) -> Tensor:
        if x.is_floating_point():
            return torch.randn(x.shape, dtype=x.dtype)
        return torch.randint(vocabulary if x.dim() > 1 else config.num_labels, x.shape)

    return {name: drawn(name, x) for name, x in shapes.items()}


def _check_room(name: str, modules: nn.Module, most_bytes: int | None) -> None:
    needed = 2 * sum(p.nbytes for p in modules.parameters())
    if most_bytes is not None and needed > most_bytes // 2:
        raise ModelConfigError(
            f"{name} needs {readable_size(needed)} for weights and gradients alone, and this machine has "
            f"{readable_size(most_bytes)}: measure a model with fewer layers (--layers 2), or use estimate"
        )


def _shortened(config: Any, layers: int) -> Any:
    """The config of a model with so many layers."""
    values = config.to_dict()
    known = [name for name in _LAYERS if isinstance(values.get(name), int)]
    if not known:
        raise ModelConfigError(f"a {type(config).__name__} does not say how many layers it has in a way known here")
    shorter = {name: layers for name in known}
    if isinstance(values.get("layer_types"), list):
        shorter["layer_types"] = values["layer_types"][:layers]
    return type(config).from_dict({**values, **shorter})
