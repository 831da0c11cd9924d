"""Linear layers with quantised weights in an estimate: their bytes, and the temporary copy that a product needs.

A quantised weight is frozen. Its product needs the weight in the activations' dtype, which is made for the product and
dropped again, in the forward and in the backward, or held from one to the other: `formats` says which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ....errors import ModelConfigError
from ....reference.device_rules import device_rules
from .experts import PackedExperts, pack_experts
from .formats import BLOCK, FORMATS, TORCHAO, Format, format_of, method_of
from .layers import features, is_wanted, packed_layers, unpacked_note

# the types of torchao's weights -> the entries of TORCHAO that make them
_TYPES = {"Int8Tensor": "int8weightonly", "Float8Tensor": "float8weightonly", "Int4Tensor": "int4weightonly"}


class QuantizedLinear(nn.Linear):
    """A linear layer with packed weights: uint8 codes and the tensors beside them, on the meta device.

    Args:
        linear: The layer: an `nn.Linear` or a `Conv1D`.
        stored: How the weight is stored.
        sizes: Bytes of the codes and of each tensor beside them; None: as the format says.
    """

    def __init__(self, linear: Any, stored: Format, sizes: Sequence[int] | None = None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = features(linear)
        self.stored, self.count = stored, self.in_features * self.out_features
        self.dtype = linear.weight.dtype if linear.weight.is_floating_point() else torch.bfloat16
        codes = stored.codes(self.count)
        size, *beside = sizes or [codes, *stored.scales(self.out_features, self.in_features)]
        self.weight = nn.Parameter(torch.empty(size, 1, dtype=torch.uint8, device="meta"), requires_grad=False)
        self.register_parameter("bias", linear.bias)
        for number, nbytes in enumerate(beside):
            self.register_buffer(f"scale{number}", torch.empty(nbytes, dtype=torch.uint8, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        """The product of x [..., in], with a weight that is made for it."""
        if self.stored.holds_copy:
            return self._of_plain_ops(x)
        y: Tensor = _Product.apply(x, self.bias, self)  # type: ignore[no-untyped-call]
        return y

    def _of_plain_ops(self, x: Tensor) -> Tensor:
        """The product as torchao computes it."""
        y = x.reshape(-1, x.size(-1)) @ _unpacked(self, x).t()
        if self.stored.scales_product:
            y = y * x.new_empty(self.out_features)
        y = y.reshape(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: QuantizedLinear) -> Tensor:
        ctx.layer, ctx.shape = layer, x.shape
        if layer.stored.holds_input:
            ctx.held = x.reshape(-1, x.size(-1))
            if not _on_cpu(x):
                return _of_integers(layer, x)
        return nn.functional.linear(x, _scaled(layer, x), bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dbias = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return dy @ _scaled(ctx.layer, dy) if ctx.needs_input_grad[0] else None, dbias, None


def _of_integers(layer: QuantizedLinear, x: Tensor) -> Tensor:
    """A product of 8-bit integers, whose sums have 32 bits until they are scaled."""
    rows, columns = x.numel() // x.size(-1), layer.out_features
    sums, code = x.new_empty(rows, columns, dtype=torch.int32), x.new_empty(1)
    # a product of the same shapes, for its count of operations and its result; codes take no memory here
    y = torch.mm(code.expand(rows, x.size(-1)), code.expand(x.size(-1), columns))
    del sums
    return y.view(*x.shape[:-1], columns)


def _scaled(layer: QuantizedLinear, like: Tensor) -> Tensor:
    """The weight in a tensor's dtype. 8-bit integers are cast and multiplied by fp32 scales in place, which a CPU does
    in fp32."""
    weight = _unpacked(layer, like)
    if layer.stored.holds_input and _on_cpu(like) and like.dtype != torch.float32:
        # the weight in fp32, and the product
        _ = [weight.new_empty(weight.shape, dtype=torch.float32) for _ in range(2)]
    return weight


def _on_cpu(x: Tensor) -> bool:
    rules = device_rules()
    return x.device.type == "cpu" and (rules is None or rules.on_cpu)


def _unpacked(layer: QuantizedLinear, like: Tensor) -> Tensor:
    return like.new_empty(layer.out_features, layer.in_features)


def quantize(model: nn.Module, config: Any) -> None:
    """Replace layers of a model on the meta device, in place, except those that the method leaves alone.

    Raises ModelConfigError if the method packs nothing of this model.
    """
    stored = format_of(config)
    if stored is None:
        return
    if stored.experts:
        pack_experts(model, stored, is_wanted(model, config))
    else:
        _pack_layers(model, config, stored)
    for p in model.parameters():
        p.requires_grad_(False)


def _pack_layers(model: nn.Module, config: Any, stored: Format) -> None:
    found = list(packed_layers(model, config))
    if not found:
        raise ModelConfigError(
            f"{method_of(config)} packs no layer of {type(model).__name__} (the table in memory/estimation/"
            "quantized/layers.py says which kinds): its weights stay as they are; estimate it without quantisation"
        )
    for path, layer in found:
        model.set_submodule(path, QuantizedLinear(layer, stored))


def packed_as(model: nn.Module) -> str | None:
    """How many bits the packed weights of a model have, in words; None if it has none."""
    packed = [module for module in model.modules() if isinstance(module, QuantizedLinear | PackedExperts)]
    bits = sorted({module.stored.bits for module in packed})
    return f"packed weights of {'/'.join(map(str, bits))} bits" if bits else None


def packed_weights(model: nn.Module) -> dict[str, tuple[Format, list[int]]]:
    """Path of each linear layer whose weight is a tensor made of tensors -> its format, and the bytes of each of these.

    Raises ModelConfigError for any other tensor subclass: its shape and dtype do not say how many bytes it uses.
    """
    found: dict[str, tuple[Format, list[int]]] = {}
    for name, x in model.named_parameters():
        if not is_traceable_wrapper_subclass(x):
            continue
        path, _, last = name.rpartition(".")
        kind, of = type(x).__name__, type(x).__module__.partition(".")[0]
        weight_only = of == "torchao" and getattr(x, "act_quant_kwargs", None) is None
        of_linear = last == "weight" and isinstance(model.get_submodule(path), nn.Linear)
        if kind not in _TYPES or not weight_only or not of_linear:
            raise ModelConfigError(
                f"{name} is a {kind} of {of}, whose bytes in use are not known here; memory_report(model, batch) "
                "measures the model as it is"
            )
        parts: list[Any] = [getattr(x, inside) for inside in x.__tensor_flatten__()[0]]
        stored = TORCHAO[_TYPES[kind]]
        per_row = stored.scales_product and parts[1].numel() == x.size(0)
        found[path] = replace(stored, scales_product=per_row), [part.nbytes for part in parts]
    return found


def stand_ins(model: nn.Module, packed: Mapping[str, tuple[Format, list[int]]]) -> None:
    """In a copy on the meta device, replace the layers of bitsandbytes and torchao, which cannot run without data;
    `packed` are the `packed_weights` of the model itself.
    """
    for path, module in list(model.named_modules()):
        if path in packed:
            model.set_submodule(path, QuantizedLinear(module, *packed[path]))
        elif type(module).__module__.startswith("bitsandbytes.") and isinstance(module, nn.Linear):
            model.set_submodule(path, QuantizedLinear(module, _of_bitsandbytes(module)))


def notes_of(model: nn.Module) -> list[str]:
    """Why a model on the meta device cannot be trained as it is, once for each reason, and what is left unpacked."""
    packed = [module for module in model.modules() if isinstance(module, QuantizedLinear | PackedExperts)]
    notes = dict.fromkeys(module.stored.note for module in packed if module.stored.note)
    return [*notes, *unpacked_note(model, sum(module.count for module in packed))]


def _of_bitsandbytes(module: Any) -> Format:
    if "8bit" in type(module).__name__:
        return FORMATS["int8"]
    state = getattr(module, "quant_state", None) or getattr(module.weight, "quant_state", None)
    nested = getattr(state, "nested", None)
    double = bool(getattr(module.weight, "compress_statistics", True)) if nested is None else bool(nested)
    return Format(4, getattr(state, "blocksize", BLOCK), 32, double=double)
