"""What the benchmark of the kernels measures: functions, and their arguments at the sizes of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

VOCAB, HEADS = 32064, 32
# tokens of a sequence, tokens of a tile and kept fraction of the codecs' defaults
SEQUENCE, BLOCK, FRACTION = 2048, 32, 0.3

Args = tuple[Any, ...]
# from a function's name to the function, of one implementation
Functions = Callable[[str], Callable[..., Any]]


class Shape(NamedTuple):
    """The sizes of the activations, and their device and dtype."""

    device: torch.device
    dtype: torch.dtype
    tokens: int
    hidden: int
    mlp: int

    def normal(self, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=self.device).to(self.dtype)


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Args:
        name: Name of the kernel.
        label: What distinguishes the line from others of the same name.
        mlp: Whether its rows are as wide as the MLP; otherwise they are as wide as the hidden state.
        sample: Selects one of the samples of the kernel's module; by default the first one.
        make: Makes the arguments instead, with functions of the reference.
        run: What is timed, from a choice of implementations and the arguments; by default a call of `name`.
        rival: What `auto` would run instead, from the kernels and the arguments; by default the reference's
            function.
        bandwidth: Whether memory limits its speed; this is not so if it has a matrix product.
    """

    name: str
    label: str = ""
    mlp: bool = False
    sample: Callable[[Args], bool] | None = None
    make: Callable[[Shape, Functions], Args] | None = None
    run: Callable[[Functions, Args], Any] | None = None
    rival: Callable[[Functions, Args], Any] | None = None
    bandwidth: bool = True


def of(*wanted: Any) -> Callable[[Args], bool]:
    """Selects the sample that has these values among its arguments that are no tensors."""
    return lambda args: all(any(type(a) is type(w) and a == w for a in args) for w in wanted)


def heads(shape: Shape, _: Functions) -> Args:
    """A query in attention's layout: heads before tokens, as a view of a projection."""
    q = shape.normal(1, shape.tokens, HEADS, max(shape.hidden // HEADS, 1)).transpose(1, 2)
    return q, 8, 64, False, None


def rotary(shape: Shape, _: Functions) -> Args:
    """Queries, and a quarter as many keys, in attention's layout (heads before tokens), and one sequence's angles."""
    size = max(shape.hidden // HEADS, 2)
    length = min(SEQUENCE, shape.tokens)
    q, k = (shape.normal(shape.tokens // length, length, h, size).transpose(1, 2) for h in (HEADS, HEADS // 4))
    angles = torch.randn(1, 1, length, size // 2, device=shape.device).repeat(1, 1, 1, 2)
    return q, k, angles.cos().to(shape.dtype), angles.sin().to(shape.dtype)


def rotated(functions: Functions, args: Args) -> Any:
    q, k, cos, sin = args
    return tuple(functions("rope_fwd")(x, cos, sin) for x in (q, k))


def rotated_back(functions: Functions, args: Args) -> Any:
    q, k, cos, sin = args
    return tuple(functions("rope_bwd")(x, cos, sin, x.dtype) for x in (q, k))


def head(shape: Shape, _: Functions) -> Args:
    """Hidden states, a vocabulary (a smaller one in a quick run), and targets."""
    tokens, vocab = max(shape.tokens // 4, 1), min(VOCAB, 16 * shape.hidden)
    weight = torch.randn(vocab, shape.hidden, device=shape.device) * shape.hidden**-0.5
    target = torch.randint(vocab, (tokens,), device=shape.device)
    h = shape.normal(tokens, shape.hidden)
    return h, weight.to(shape.dtype), None, target, (), torch.float32, None, None, None


def forward_and_backward(functions: Functions, args: Args) -> Any:
    """The loss head as in a training step. Liger's forward does all of it."""
    h, weight, bias, target, pointwise, *_ = args
    losses, maximum, log_sum, _ = functions("linear_cross_entropy_fwd")(*args)
    dlosses = torch.full_like(losses, 1 / len(losses))
    backward = functions("linear_cross_entropy_bwd")
    return losses, backward(dlosses, h, weight, bias, target, maximum, log_sum, pointwise, (True, True, False))


# linear -> its outputs and features; there are a quarter as many heads of keys and values
LINEARS: dict[str, Callable[[Shape], tuple[int, int]]] = {
    "q, o": lambda shape: (shape.hidden, shape.hidden),
    "k, v": lambda shape: (shape.hidden // 4, shape.hidden),
    "gate, up": lambda shape: (shape.mlp, shape.hidden),
    "down": lambda shape: (shape.hidden, shape.mlp),
}
# makes arguments from dy [R, O] and x [R, D]
Packed = Callable[[torch.Tensor, torch.Tensor, Functions], Args]


def _int_group(bits: int) -> Packed:
    return lambda dy, x, functions: (dy, *functions("int_group_pack")(x, bits, 64, False), x.size(1), bits, 64)


def _float8(dy: torch.Tensor, x: torch.Tensor, functions: Functions) -> Args:
    return dy, *functions("float8_pack")(x, torch.float8_e4m3fn, 128), 128


def _block_sparse(dy: torch.Tensor, x: torch.Tensor, functions: Functions) -> Args:
    k = max(int(FRACTION * len(x) / BLOCK), 1)
    return dy, *functions("block_sparse_pack")(x, (BLOCK, BLOCK), k, "column"), x.size(1), "column"


def _row_sample(dy: torch.Tensor, x: torch.Tensor, functions: Functions) -> Args:
    return dy, *functions("row_sample_pack")(x, max(int(FRACTION * len(x)), 1), True, False)


def _pooled(dy: torch.Tensor, x: torch.Tensor, functions: Functions) -> Args:
    length = min(SEQUENCE, len(x))
    dy, x = (rows.view(-1, length, rows.size(1)) for rows in (dy, x))
    return dy, functions("pooled_pack")(x, 2), 2


def _unpacked_codes(functions: Functions, args: Args) -> Any:
    """The kernel that unpacks, and torch's product."""
    dy, codes, scale, zero, features, bits, group_size = args
    return dy.t().mm(functions("int_group_unpack")(codes, scale, zero, features, dy.dtype, bits, group_size))


def _unpacked_floats(functions: Functions, args: Args) -> Any:
    dy, codes, scale, group_size = args
    return dy.t().mm(functions("float8_unpack")(codes, scale, dy.dtype, group_size))


RIVALS = {"int_group_grad_weight": _unpacked_codes, "float8_grad_weight": _unpacked_floats}


def _weight_gradients() -> Iterator[Case]:
    """Stored inputs of a layer's linears: the kernel against unpacking in a separate pass and torch's product."""
    formats: dict[tuple[str, str], Packed] = {
        **{("int_group_grad_weight", f"{bits} bits"): _int_group(bits) for bits in (8, 4, 2)},
        ("float8_grad_weight", "e4m3"): _float8,
        ("block_sparse_grad_weight", "by column"): _block_sparse,
        ("row_sample_grad_weight", "0.3"): _row_sample,
        ("pooled_grad_weight", "by 2"): _pooled,
    }
    for (name, label), packed in formats.items():
        # a single line shows whether what holds for 4 bits also holds for 2
        linears = ["gate, up"] if label == "2 bits" else LINEARS
        for linear in linears:

            def make(shape: Shape, functions: Functions, packed: Packed = packed, linear: str = linear) -> Args:
                outputs, features = LINEARS[linear](shape)
                dy, x = shape.normal(shape.tokens, outputs), shape.normal(shape.tokens, features)
                return packed(dy, x, functions)

            yield Case(name, f"{label}; {linear}", make=make, rival=RIVALS.get(name), bandwidth=False)


CASES = (
    Case("rms_norm_fwd", sample=of("weight_after_cast")),
    Case("rms_norm_rebuild", sample=of("weight_after_cast")),
    Case("rms_norm_bwd", sample=of("weight_after_cast")),
    Case("rms_norm_output_bwd", sample=of("weight_after_cast")),
    Case("layer_norm_bwd", sample=lambda args: isinstance(args[-2], torch.Tensor)),
    Case("layer_norm_output_bwd", sample=lambda args: isinstance(args[-2], torch.Tensor)),
    Case("activation_fwd", "gelu_new", mlp=True, sample=of("gelu_new")),
    Case("activation_fwd", "quick_gelu", mlp=True, sample=of("quick_gelu")),
    Case("activation_value", "gelu_new", mlp=True, sample=of("gelu_new")),
    Case("activation_bwd", "gelu_new", mlp=True, sample=of("gelu_new")),
    Case("activation_bwd", "relu_squared", mlp=True, sample=of("relu_squared")),
    Case("activation_derivative", "gelu", mlp=True, sample=of("gelu")),
    Case("activation_output_bits", "gelu", mlp=True, sample=of("gelu")),
    Case("activation_output_bwd", "gelu", mlp=True, sample=of("gelu")),
    Case("fewbit_codes", "gelu, 4 bits, values", mlp=True, sample=of("gelu", 4)),
    Case("fewbit_bwd", "silu, 4 bits", mlp=True, sample=of("silu", 4)),
    Case("gated_product_fwd", "silu", mlp=True, sample=of("silu")),
    Case("gated_product_fwd", "gelu_tanh", mlp=True, sample=of("gelu_tanh")),
    Case("gated_product", "silu", mlp=True, sample=of("silu")),
    Case("gated_product_and_bwd", "silu", mlp=True, sample=of("silu")),
    Case("gated_product_bwd", "silu", mlp=True, sample=of("silu")),
    Case("gated_product_bwd", "gelu_tanh", mlp=True, sample=of("gelu_tanh")),
    Case("rope_fwd", "q and k", make=rotary, run=rotated),
    Case("rope_bwd", "q and k", make=rotary, run=rotated_back),
    *(Case("int_group_pack", f"{b} bits", sample=of(b, 64, False)) for b in (8, 4, 2)),
    Case("int_group_pack", "4 bits, stochastic", sample=of(4, 64, True)),
    Case("int_group_pack", "8 bits, heads before tokens", make=heads),
    *(Case("int_group_unpack", f"{b} bits", sample=of(b, 64)) for b in (8, 4, 2)),
    Case("float8_pack", "e4m3", sample=of(torch.float8_e4m3fn, 128)),
    Case("float8_unpack", "e4m3", sample=lambda args: args[0].dtype == torch.float8_e4m3fn and args[-1] == 128),
    Case("topk_unpack", "bit mask", sample=of(True)),
    Case("topk_unpack", "index", sample=of(False)),
    Case("topk_grad_weight", "bit mask", sample=of(True), bandwidth=False),
    Case("linear_cross_entropy_fwd", make=head, bandwidth=False),
    Case("linear_cross_entropy_bwd", "with forward", make=head, run=forward_and_backward, bandwidth=False),
    *_weight_gradients(),
)
