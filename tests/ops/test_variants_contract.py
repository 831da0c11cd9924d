"""The contract of variants with autograd: they write on no tensor, and allow a second backward, unusual gradients,
checkpoints, autocast and compiling.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN

from hf_actcompress.methods.derivative.op import activation_derivative
from hf_actcompress.methods.fewbit.op import activation_fewbit
from hf_actcompress.methods.inverted.op import activation_output
from hf_actcompress.methods.norm_output.op import layer_norm_output, rms_norm_output
from hf_actcompress.methods.tempo.op import attention_tempo
from hf_actcompress.records import frame, live_entries
from tests.oracle import assert_equal_bits, clones, graph_nodes, pattern, tensors_in

Variant = Callable[[Tensor], Tensor]
WIDTH = 12
GAIN = torch.linspace(0.5, 1.5, WIDTH)
BIAS = torch.linspace(-0.5, 0.5, WIDTH)
GELU_NEW = ACT2FN["gelu_new"]


def attend(x: Tensor) -> Tensor:
    """Attention with dropout over x [rows, 12], which is read as 2 sequences of 2 heads of 6."""
    heads = x.reshape(2, -1, 2, WIDTH // 2).transpose(1, 2)
    out, _ = attention_tempo(heads, heads, heads, None, 0.4, dropout=0.25)
    return out.transpose(1, 2).reshape(x.shape)


def normalise(x: Tensor) -> Tensor:
    return layer_norm_output(x, (WIDTH,), GAIN.to(x.dtype), BIAS.to(x.dtype))


POINTWISE: dict[str, tuple[Variant, Variant]] = {
    "gelu_output": (partial(activation_output, stock=functional.gelu, kind="gelu"), functional.gelu),
    "silu_output": (partial(activation_output, stock=functional.silu, kind="silu"), functional.silu),
    "gelu_new_output": (partial(activation_output, stock=GELU_NEW, kind="gelu_new"), GELU_NEW),
    "fewbit_steps": (
        partial(activation_fewbit, stock=functional.gelu, kind="gelu", bits=3, method="steps"),
        functional.gelu,
    ),
    "fewbit_values": (
        partial(activation_fewbit, stock=functional.silu, kind="silu", bits=4, method="values"),
        functional.silu,
    ),
    "fewbit_8": (partial(activation_fewbit, stock=functional.gelu, kind="gelu", bits=8), functional.gelu),
    "fewbit_scaled": (
        partial(activation_fewbit, stock=ACT2FN["relu2"], kind="relu_squared", bits=8),
        ACT2FN["relu2"],
    ),
    "fewbit_relus": (
        partial(activation_fewbit, stock=functional.silu, kind="silu", bits=2, method="relus"),
        functional.silu,
    ),
    "derivative": (partial(activation_derivative, stock=GELU_NEW, kind="gelu_tanh"), GELU_NEW),
}
NORMS: dict[str, tuple[Variant, Variant]] = {
    "layer_norm_output": (
        normalise,
        lambda x: functional.layer_norm(x, (WIDTH,), GAIN.to(x.dtype), BIAS.to(x.dtype)),
    ),
    "rms_norm_output": (
        lambda x: rms_norm_output(x, GAIN.to(x.dtype), 1e-6, "weight_in_fp32"),
        lambda x: functional.rms_norm(x, (WIDTH,), GAIN.to(x.dtype), 1e-6),
    ),
}
VARIANTS = {name: pair[0] for name, pair in {**POINTWISE, **NORMS}.items()} | {"attention_tempo": attend}


def leaf(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(8, WIDTH).to(dtype).requires_grad_()


def seeded(variant: Variant, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return variant(x)


every_variant = pytest.mark.parametrize("name", VARIANTS)


@every_variant
def test_backward_twice_and_nothing_written(name: str) -> None:
    x = leaf()
    x_before = x.detach().clone()
    y = seeded(VARIANTS[name], x)
    y_before, dy = y.detach().clone(), pattern(y)
    dy_before = dy.clone()
    (first,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    state = torch.get_rng_state()
    first_before = first.clone()
    (second,) = torch.autograd.grad(y, x, dy)
    assert_equal_bits([second, x, y, dy, first], [first, x_before, y_before, dy_before, first_before])
    assert torch.equal(torch.get_rng_state(), state)


@every_variant
def test_expanded_and_transposed_gradients(name: str) -> None:
    x = leaf()
    for dy in (torch.ones(1, 1).expand(8, WIDTH), pattern(x).t().contiguous().t()):
        y = seeded(VARIANTS[name], x)
        (ours,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        (expected,) = torch.autograd.grad(y, x, dy.contiguous())
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)


@every_variant
def test_inputs_of_any_layout(name: str) -> None:
    wide = torch.randn(8, 2 * WIDTH)
    for x in (wide[:, ::2], torch.randn(WIDTH, 8).t()):
        strided, dense = clones([x.requires_grad_()])[0], x.detach().contiguous().requires_grad_()
        ys = [seeded(VARIANTS[name], t) for t in (strided, dense)]
        dys = [pattern(dense).view(8, WIDTH)] * 2
        grads = [torch.autograd.grad(y, t, dy)[0] for y, t, dy in zip(ys, (strided, dense), dys, strict=True)]
        # a CPU's erf of a strided tensor may differ in the last bit, which the slope near gelu's minimum amplifies
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=2e-6)


@every_variant
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(name: str, reentrant: bool) -> None:
    x = leaf()
    plain = seeded(VARIANTS[name], x * 2)
    (expected,) = torch.autograd.grad(plain, x, pattern(plain))
    y = seeded(lambda x: checkpoint(lambda x: VARIANTS[name](x * 2), x, use_reentrant=reentrant), x)
    (ours,) = _backward(y, x) if reentrant else torch.autograd.grad(y, x, pattern(y))
    assert torch.equal(ours, expected)


def _backward(y: Tensor, x: Tensor) -> tuple[Tensor]:
    """Reentrant checkpoints work only with `backward`."""
    y.backward(pattern(y))
    assert x.grad is not None
    return (x.grad,)


@every_variant
def test_saved_tensors_are_seen_by_hooks_and_ctx_holds_none(name: str) -> None:
    x = leaf()
    seen: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        y = seeded(VARIANTS[name], x)
    assert seen
    for node in graph_nodes(y):
        assert not list(tensors_in(getattr(node, "__dict__", {})))


@every_variant
def test_no_double_backward(name: str) -> None:
    x = leaf()
    y = seeded(VARIANTS[name], x)
    dy = pattern(y).requires_grad_()
    (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
    with pytest.raises(RuntimeError, match="unpatch_model"):
        dx.sum().backward()


@every_variant
def test_nothing_is_left_behind(name: str) -> None:
    x = leaf()
    with frame():
        y = seeded(VARIANTS[name], x)
        y.sum().backward()
        del y
        gc.collect()
        assert live_entries() == 0


@every_variant
def test_zero_rows(name: str) -> None:
    x = torch.randn(0, WIDTH, requires_grad=True)
    y = VARIANTS[name](x)
    assert y.shape == x.shape
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.shape == x.shape


@pytest.mark.parametrize("name", POINTWISE)
def test_zero_columns(name: str) -> None:
    x = torch.randn(3, 0, requires_grad=True)
    (dx,) = torch.autograd.grad(VARIANTS[name](x).sum(), x)
    assert dx.shape == (3, 0)


@pytest.mark.parametrize("name", POINTWISE)
def test_scalars(name: str) -> None:
    x = torch.tensor(0.7, requires_grad=True)
    (dx,) = torch.autograd.grad(VARIANTS[name](x), x)
    assert dx.shape == () and (dx - _slope(name, x)).abs() < 0.3


def _slope(name: str, x: Tensor) -> Tensor:
    return torch.autograd.grad(POINTWISE[name][1](x), x)[0]


@pytest.mark.parametrize("name", [*POINTWISE, *NORMS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_values_and_dtypes_are_stock_s(name: str, dtype: torch.dtype, autocast: torch.dtype | None) -> None:
    ours, stock = {**POINTWISE, **NORMS}[name]
    x = leaf(dtype)
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        y, expected = ours(x), stock(x)
    if name != "rms_norm_output":
        assert_equal_bits([y], [expected])
    (dx,) = torch.autograd.grad(y, x, pattern(y))
    assert y.dtype == expected.dtype and dx.dtype == dtype


# compiled graphs run stock's eager attention
@pytest.mark.daily(4)
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "attention_tempo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled(name: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    variant = VARIANTS[name]
    compiled = torch.compile(variant, fullgraph=True, backend="aot_eager")
    x = leaf(dtype)
    results = []
    for function in (variant, compiled):
        y = function(x)
        results.append([y.detach(), *torch.autograd.grad(y, x, pattern(y))])
    torch.testing.assert_close(results[1], results[0], rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
