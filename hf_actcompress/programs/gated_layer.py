"""Pre-norm layers with attention and a gated MLP (Llama, Mistral, Qwen, ...) as two programs around the attention.

The first goes from the layer's input to q, k and v; the second from the attention's output to the layer's output. The
attention between them is that of the leaf path, so that its masks and kernels are chosen in one place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..codecs import IDENTITY
from ..modules.attention import AttentionMixin
from ..modules.base import Settings, settings_of
from ..modules.gated_mlp import SplitGatedMLPMixin
from ..modules.leaves import LinearMixin, RMSNormMixin
from .program import Builder, Program
from .steps import Add, GatedProduct, Heads, Linear, RMSNorm, Rope, Swap

# the dictionary and the name under which each tensor is; None where there is none
Places = tuple[tuple[dict[str, Any], str] | None, ...]


@dataclass(frozen=True)
class Part:
    """A child of a module and its name there: the same object at every call, or somebody has exchanged it."""

    parent: nn.Module
    name: str
    module: nn.Module

    @property
    def settings(self) -> Settings:
        found = settings_of(self.module)
        assert found is not None
        return found


@dataclass(frozen=True)
class GatedLayer:
    """The parts of one layer. `q_norm` and `k_norm` are None where the heads are not normed."""

    attention: Part
    mlp: Part
    norm: Part
    q: Part
    k: Part
    v: Part
    o: Part
    q_norm: Part | None
    k_norm: Part | None
    mlp_norm: Part
    gate: Part
    up: Part
    down: Part
    act: Part

    def parts(self) -> tuple[Part, ...]:
        return tuple(part for part in vars(self).values() if part is not None)


def find_parts(layer: nn.Module) -> GatedLayer | str | None:
    """The parts of a layer of this structure, found by their roles and order; None: another one; or why not."""
    by_kind: dict[type, list[Part]] = {AttentionMixin: [], SplitGatedMLPMixin: [], RMSNormMixin: []}
    for part in _children(layer):
        kind = next((kind for kind in by_kind if isinstance(part.module, kind)), None)
        if kind is None:
            return None
        by_kind[kind].append(part)
    attentions, mlps, norms = by_kind.values()
    if (len(attentions), len(mlps), len(norms)) != (1, 1, 2):
        return None
    inside = _children(attentions[0].module)
    linears = [part for part in inside if isinstance(part.module, LinearMixin)]
    head_norms = [part for part in inside if isinstance(part.module, RMSNormMixin)]
    if len(linears) != 4 or len(head_norms) not in (0, 2) or len(linears) + len(head_norms) != len(inside):
        return "its attention has other parts than four plain linear layers and two norms"
    mlp = mlps[0].module
    names = mlps[0].settings.options
    of_mlp = {part.name: part for part in _children(mlp)}
    gate, up, down, act = (of_mlp[name] for name in names)
    if any(settings_of(part.module) is None for part in (gate, up, down, act)):
        return "its MLP has parts that are not plain linear layers or activations"
    q, k, v, o = linears
    q_norm, k_norm = head_norms or (None, None)
    found = GatedLayer(attentions[0], mlps[0], norms[0], q, k, v, o, q_norm, k_norm, norms[1], gate, up, down, act)
    if any(part.settings.codec != IDENTITY or part.settings.keeps == "output" for part in found.parts()):
        return "it keeps something through a codec"
    return found


def _children(module: nn.Module) -> list[Part]:
    return [Part(module, name, child) for name, child in module._modules.items() if child is not None]


# the tensors of each program, in order
_BEFORE = ("x", "norm", "q", "k", "v", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "cos", "sin")
_AFTER = ("heads", "x", "o", "o_bias", "mlp_norm", "gate", "up", "down", "gate_bias", "up_bias", "down_bias")


def program_before(parts: GatedLayer) -> Program:
    """From x [B, S, C], weights and angles [B or 1, S, D] to q and k [B, H, S, D], turned, and v."""
    attention: Any = parts.attention.module
    b = Builder(_BEFORE)
    _add_norm(b, parts.norm, "n", "x", "norm")
    for name in ("q", "k", "v"):
        norm: Part | None = getattr(parts, f"{name}_norm", None)
        _add_linear(b, getattr(parts, name), f"{name}_rows", "n", name)
        b.add(Heads, f"{name}_heads", x=f"{name}_rows", size=attention.head_dim, swap=norm is None)
        if norm is not None:
            _add_norm(b, norm, f"{name}_normed", f"{name}_heads", f"{name}_norm")
            b.add(Swap, f"{name}_swapped", x=f"{name}_normed")
    for name in ("q", "k"):
        x = f"{name}_heads" if getattr(parts, f"{name}_norm") is None else f"{name}_swapped"
        b.add(Rope, f"{name}_turned", x=x, cos="cos", sin="sin")
    return b.program("q_turned", "k_turned", "v_heads")


def program_after(parts: GatedLayer) -> Program:
    """From the attention's output [B, S, H * D], x and weights to the layer's output."""
    act: Any = parts.act.module
    b = Builder(_AFTER)
    _add_linear(b, parts.o, "attended", "heads", "o")
    b.add(Add, "z", a="x", b="attended")
    _add_norm(b, parts.mlp_norm, "n", "z", "mlp_norm")
    _add_linear(b, parts.gate, "g", "n", "gate")
    _add_linear(b, parts.up, "u", "n", "up")
    kind, options = parts.act.settings.variant, parts.act.settings.options
    b.add(GatedProduct, "h", gate="g", up="u", stock=act.stock_forward(), kind=kind, options=options)
    _add_linear(b, parts.down, "d", "h", "down")
    b.add(Add, "y", a="z", b="d")
    return b.program("y")


def _add_linear(b: Builder, part: Part, y: str, x: str, weight: str) -> None:
    layer, transposed = part.module, part.settings.variant == "transposed"
    bias = f"{weight}_bias" if layer._parameters.get("bias") is not None else None
    b.add(Linear, y, x=x, weight=weight, bias=bias, transposed=transposed)


def _add_norm(b: Builder, part: Part, y: str, x: str, weight: str) -> None:
    eps_name, _, _ = part.settings.options
    rstd = f"{y}_rstd"
    b.value(rstd)
    b.add(RMSNorm, y, x=x, weight=weight, rstd=rstd, eps=getattr(part.module, eps_name), variant=part.settings.variant)


def places_before(parts: GatedLayer) -> Places:
    """Of the tensors of the first program between x and the angles."""
    linears, norms = (parts.q, parts.k, parts.v), (parts.q_norm, parts.k_norm)
    weights, biases = [_place(part, "weight") for part in linears], [_place(part, "bias") for part in linears]
    return (_place(parts.norm, "weight"), *weights, *biases, *(_place(norm, "weight") for norm in norms))


def places_after(parts: GatedLayer) -> Places:
    """Of the tensors of the second program behind x."""
    mlp = (parts.gate, parts.up, parts.down)
    weights, biases = [_place(part, "weight") for part in mlp], [_place(part, "bias") for part in mlp]
    output = _place(parts.o, "weight"), _place(parts.o, "bias")
    return (*output, _place(parts.mlp_norm, "weight"), *weights, *biases)


def _place(part: Part | None, name: str) -> tuple[dict[str, Any], str] | None:
    return (part.module._parameters, name) if part is not None else None  # type: ignore[return-value]
