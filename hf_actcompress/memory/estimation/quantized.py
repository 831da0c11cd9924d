"""Linear layers with quantised weights in an estimate: their bytes, and the temporary copy that a product needs.

A quantised weight is frozen. Its product needs the weight in the activations' dtype. That copy is made for one product
and dropped again, in the forward and in the backward. bitsandbytes' 8-bit product also keeps its input for backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers.base import get_keys_to_not_convert

from ...errors import ModelConfigError

# bitsandbytes: weights per scale, and scales per second-level scale (double quantisation)
_BLOCK, _SCALES = 64, 256


@dataclass(frozen=True)
class Format:
    """How the weights of a layer are stored.

    Args:
        bits: Bits of a weight.
        group: How many weights share a scale; 0: all weights of an output feature do.
        scale_bits: Bits of a scale together with its zero point.
        double: The scales are stored in 8 bits, with scales of their own.
        holds_input: The product keeps its input for backward.
    """

    bits: int
    group: int
    scale_bits: int
    double: bool = False
    holds_input: bool = False

    def scales(self, outputs: int, inputs: int) -> list[int]:
        """Bytes of each tensor that is stored beside the codes."""
        count = outputs if not self.group else -(-outputs * inputs // self.group)
        if not self.double:
            return [count * self.scale_bits // 8]
        return [count, 4 * -(-count // _SCALES)]


# formats that can be asked for by name, without a config
FORMATS = {
    "nf4": Format(4, _BLOCK, 32, double=True),
    "fp4": Format(4, _BLOCK, 32),
    "int8": Format(8, 0, 32, holds_input=True),
}


def format_of(config: Any) -> Format:
    """The format of a `quantization_config`, as an object or a dict, or of a name ("nf4", "fp4", "int8").

    Raises ModelConfigError for a method whose bytes are not known here.
    """
    if isinstance(config, str):
        if config not in FORMATS:
            raise ModelConfigError(f"unknown quantisation {config!r}; known: {', '.join(FORMATS)}")
        return FORMATS[config]
    options = config if isinstance(config, dict) else config.to_dict()
    method = str(getattr(options.get("quant_method"), "value", options.get("quant_method") or "bitsandbytes")).lower()
    if method.startswith("bitsandbytes"):
        if options.get("load_in_8bit"):
            return FORMATS["int8"]
        return Format(4, _BLOCK, 32, double=bool(options.get("bnb_4bit_use_double_quant")))
    if method in ("gptq", "awq"):
        bits, group = int(options.get("bits", 4)), int(options.get("group_size", 128))
        return Format(bits, max(group, 0), 16 + bits)
    raise ModelConfigError(f"weights quantised by {method!r} are not estimated; bitsandbytes, gptq and awq are")


class QuantizedLinear(nn.Linear):
    """A linear layer with packed weights: uint8 codes and the tensors beside them, on the meta device."""

    def __init__(self, linear: nn.Linear, stored: Format) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.stored = linear.in_features, linear.out_features, stored
        self.dtype = linear.weight.dtype if linear.weight.is_floating_point() else torch.bfloat16
        size = -(-linear.in_features * linear.out_features * stored.bits // 8)
        self.weight = nn.Parameter(torch.empty(size, 1, dtype=torch.uint8, device="meta"), requires_grad=False)
        self.register_parameter("bias", linear.bias)
        for number, nbytes in enumerate(stored.scales(linear.out_features, linear.in_features)):
            self.register_buffer(f"scale{number}", torch.empty(nbytes, dtype=torch.uint8, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        """The product of x [..., in] with a temporary copy of the weight in x's dtype."""
        y: Tensor = _Product.apply(x, self.bias, self)  # type: ignore[no-untyped-call]
        return y


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: QuantizedLinear) -> Tensor:
        ctx.layer, ctx.shape = layer, x.shape
        if layer.stored.holds_input:
            ctx.held = x.reshape(-1, x.size(-1))
        return nn.functional.linear(x, _unpacked(layer, x), bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dbias = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return dy @ _unpacked(ctx.layer, dy) if ctx.needs_input_grad[0] else None, dbias, None


def _unpacked(layer: QuantizedLinear, like: Tensor) -> Tensor:
    return like.new_empty(layer.out_features, layer.in_features)


def quantize(model: nn.Module, config: Any) -> None:
    """Replace linear layers of a model on the meta device, in place, except those that the method leaves alone."""
    stored = format_of(config)
    options = {} if isinstance(config, str) else config if isinstance(config, dict) else config.to_dict()
    skipped = [options.get(name) for name in ("llm_int8_skip_modules", "modules_to_not_convert", "modules_in_block")]
    keep = next((names for names in skipped if names), None) or get_keys_to_not_convert(model)
    for parent, name, linear in list(_linear_layers(model)):
        path = f"{parent}.{name}".lstrip(".")
        if not any(path == kept or path.endswith(f".{kept}") or f"{kept}." in path for kept in keep):
            setattr(model.get_submodule(parent), name, QuantizedLinear(linear, stored))
    for p in model.parameters():
        p.requires_grad_(False)


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, str, nn.Linear]]:
    for path, module in model.named_modules():
        if type(module) is nn.Linear:
            parent, _, name = path.rpartition(".")
            yield parent, name, module


def stand_ins(model: nn.Module) -> None:
    """In a copy on the meta device, replace bitsandbytes' layers, because these need real data to run."""
    for path, module in list(model.named_modules()):
        known = type(module).__module__.startswith("bitsandbytes.") and isinstance(module, nn.Linear)
        if known:
            stored = FORMATS["int8"] if "8bit" in type(module).__name__ else _four_bits(module)
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, QuantizedLinear(module, stored))  # type: ignore[arg-type]


def _four_bits(module: Any) -> Format:
    state = getattr(module, "quant_state", None) or getattr(module.weight, "quant_state", None)
    nested = getattr(state, "nested", None)
    double = bool(getattr(module.weight, "compress_statistics", True)) if nested is None else bool(nested)
    return Format(4, getattr(state, "blocksize", _BLOCK), 32, double=double)
