"""How many products of vocabulary size the loss head computes, what it keeps for that, and how exact it stays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hf_actcompress.ops import deferred_linear, linear_cross_entropy, plain, returned_logits
from hf_actcompress.reference import logits_chunks
from hf_actcompress.reference.logits_chunks import are_kept
from tests.oracle import assert_within_law, held_bytes

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.addmm_.default)
K, D, V = 48, 32, 1_024
# name -> (rows, whether h, weight and bias are trained, products): three if the logits are kept, two with a frozen head
WAYS: dict[str, tuple[int, tuple[bool, bool, bool], float]] = {
    "kept": (K, (True, True, True), 3),
    "made again": (4 * K, (True, True, True), 4),
    "kept, weight alone": (K, (False, True, False), 2),
    "frozen head": (4 * K, (True, False, False), 2),
    "nothing trained": (K, (False, False, False), 1),
}


# losses outside of the model, of logits that it has returned: the Trainer's label smoothing, and one of TRL's kind
def _smoothed(logits: Tensor, target: Tensor) -> Tensor:
    lost = -F.log_softmax(logits, -1)
    return 0.9 * lost.gather(-1, target[:, None]).mean() + 0.1 * lost.sum(-1, keepdim=True).mean()


def _with_entropy(logits: Tensor, target: Tensor) -> Tensor:
    known = F.log_softmax(logits, -1)
    chosen = logits.gather(-1, target[:, None])[:, 0] - logits.logsumexp(-1)
    return 0.1 * (known.exp() * known).sum(-1).mean() - chosen.mean()


OUTSIDE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"smoothed": _smoothed, "with entropy": _with_entropy}


class Products(TorchDispatchMode):
    """Multiplications of all products of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            a, b = args[-2:]
            self.count += a.size(0) * a.size(1) * b.size(1)
        return func(*args, **(kwargs or {}))


def problem(rows: int, needs: tuple[bool, ...], dtype: torch.dtype, d: int = D, v: int = V) -> tuple[Any, ...]:
    h, weight, bias = torch.randn(rows, d), torch.randn(v, d) * d**-0.5, torch.randn(v)
    leaves = [x.to(dtype).requires_grad_(need) for x, need in zip((h, weight, bias), needs, strict=True)]
    return (*leaves, torch.randint(v, (rows,)))


def wide(tensors: Any) -> list[Tensor]:
    return [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in tensors]


def gradients(tensors: Any, ours: bool, scale: float = 1.0, cap: float = 0.0, **options: Any) -> list[Tensor]:
    """The loss and the gradients of what is trained; `scale` as of a step that accumulates gradients."""
    h, weight, bias, target = tensors
    steps = (lambda x: torch.tanh(x / cap) * cap,) if cap else ()
    if ours:
        loss = linear_cross_entropy(h, weight, target, bias, pointwise=steps, **options)
    else:
        loss = F.cross_entropy(logits_chunks.applied(steps, F.linear(h, weight, bias)), target, **options)
    wanted = [x for x in (h, weight, bias) if x.requires_grad]
    return [loss.detach(), *(torch.autograd.grad(loss * scale, wanted) if wanted else ())]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("name", WAYS)
def test_products_are_counted(name: str, dtype: torch.dtype) -> None:
    rows, needs, expected = WAYS[name]
    tensors = problem(rows, needs, dtype)
    with Products() as products:
        gradients(tensors, True)
    assert products.count == expected * rows * D * V


def test_products_under_no_grad_in_fp16_and_of_logits_that_exist() -> None:
    frozen, trained = (problem(K, (True, need, need), torch.float16) for need in (False, True))
    for tensors, expected in ((frozen, 3), (trained, 3)):
        with Products() as products:
            gradients(tensors, True)
        assert products.count == expected * K * D * V
    with Products() as products, torch.no_grad():
        linear_cross_entropy(*frozen[:2], frozen[3], frozen[2])
    assert products.count == K * D * V
    logits = F.linear(*frozen[:3]).detach()
    with Products() as products:
        gradients(problem(K, (True, False, False), torch.float32), True, logits=logits.float())
    assert products.count == K * D * V


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("name", WAYS)
def test_what_is_kept(name: str, dtype: torch.dtype) -> None:
    """Beside the statistics of the rows: the logits, the inputs, or the gradient of the inputs."""
    rows, needs, _ = WAYS[name]
    tensors = problem(rows, needs, dtype)
    h, weight, bias, target = tensors
    kept = held_bytes(lambda: linear_cross_entropy(h, weight, target, bias))
    logits = rows * V * dtype.itemsize if name.startswith("kept") else 0
    assert logits <= kept <= logits + rows * D * 4 + rows * 48 + 1024
    assert bool(logits) == (are_kept(rows, D, V, dtype.itemsize) and needs[1])


def test_the_budget() -> None:
    """256 MiB, and twice the gradient of the weight; for BERT-base, Llama-3.2-1B and an 8B."""
    mib = 2**20
    assert are_kept(1_536, 768, 30_522, 2) and not are_kept(1_537, 768, 30_522, 2)
    assert are_kept(256 * mib // 2 // 128_256, 2048, 128_256, 2) and not are_kept(1_047, 2048, 128_256, 2)
    assert not are_kept(8_192, 4096, 151_936, 2)


LARGE = (30_522, 128_256, 256_000)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("vocabulary", LARGE)
@pytest.mark.parametrize("name", ("kept", "made again", "frozen head"))
def test_gradients_are_exact_at_large_vocabularies(name: str, vocabulary: int, dtype: torch.dtype) -> None:
    """Scaled by a third, which 16 bits have to round. The errors of both sides scatter: over one batch of the smallest
    vocabulary by some 10%."""
    rows, needs, _ = WAYS[name]
    batches = [problem(min(rows, 80), needs, dtype, d=32, v=vocabulary) for _ in range(LARGE[-1] // vocabulary)]
    sides = (True, batches), (False, batches), (False, list(map(wide, batches)))
    found, expected, truth = (_stacked(gradients(batch, ours, 1 / 3) for batch in side) for ours, side in sides)
    assert_within_law(found[1:], expected[1:], truth[1:])
    assert torch.equal(found[0], expected[0])


def _stacked(batches: Iterable[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(values) for values in zip(*batches, strict=True)]


@pytest.mark.usefixtures("many_chunks")
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@pytest.mark.parametrize("cap", (0.0, 3.0), ids=("plain", "softcap"))
@pytest.mark.parametrize("name", ("kept", "made again", "frozen head"))
def test_gradients_of_every_reduction(name: str, cap: float, reduction: str, dtype: torch.dtype) -> None:
    rows, needs, _ = WAYS[name]
    tensors = problem(rows, needs, dtype)
    tensors[-1][::5] = -100
    h, weight, bias, target = tensors
    results = []
    for leaves, ours in ((tensors, True), (tensors, False), (wide(tensors), False)):
        h, weight, bias, target = leaves
        steps = (lambda x: torch.tanh(x / cap) * cap,) if cap else ()
        if ours:
            loss = linear_cross_entropy(h, weight, target, bias, pointwise=steps, reduction=reduction)
        else:
            logits = logits_chunks.applied(steps, F.linear(h, weight, bias))
            loss = F.cross_entropy(logits, target, reduction=reduction)
        weights = torch.linspace(0.3, 1.7, loss.numel(), dtype=loss.dtype).view(loss.shape)
        wanted = [x for x in (h, weight, bias) if x.requires_grad]
        results.append(torch.autograd.grad(loss, wanted, weights, retain_graph=True))
        # a second backward gives the same
        again = torch.autograd.grad(loss, wanted, weights)
        assert all(torch.equal(a, b) for a, b in zip(again, results[-1], strict=True))
    assert_within_law(*results)


@pytest.mark.parametrize("name", ("kept", "frozen head"))
def test_weights_that_change_before_backward(name: str) -> None:
    """A frozen head's gradient is made already. A trained head's weight raises, as in stock."""
    rows, needs, _ = WAYS[name]
    h, weight, bias, target = problem(rows, needs, torch.float32)
    loss = linear_cross_entropy(h, weight, target, bias)
    (before,) = torch.autograd.grad(loss, h, retain_graph=True)
    with torch.no_grad():
        weight.mul_(2.0)
    if name == "kept":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, h)
    else:
        assert torch.equal(torch.autograd.grad(loss, h)[0], before)


def test_a_softmax_of_one_class() -> None:
    h, weight, bias, target = problem(20, (True, False, False), torch.float32, v=1)
    loss = linear_cross_entropy(h, weight, target, bias)
    assert loss.item() == 0 and math.isclose(torch.autograd.grad(loss, h)[0].abs().max().item(), 0)


def _returned(tensors: Any, **options: Any) -> Tensor:
    logits = returned_logits(deferred_linear(*tensors[:3], keep_logits=False, **options))
    assert logits is not None
    return logits


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("trained", (True, False), ids=("trained", "frozen"))
@pytest.mark.parametrize("name", OUTSIDE)
def test_products_of_a_loss_outside(name: str, trained: bool, dtype: torch.dtype) -> None:
    """Three with a trained head, two with a frozen one, whatever the number of functions, as if logits were kept."""
    tensors = problem(K, (True, trained, trained), dtype)
    wanted = [x for x in tensors if x.requires_grad]
    with Products() as products:
        ours = OUTSIDE[name](_returned(tensors), tensors[-1])
        found = torch.autograd.grad(ours, wanted, retain_graph=True)
    assert products.count == (3 if trained else 2) * K * D * V
    # a further backward makes them again
    assert all(map(torch.equal, found, torch.autograd.grad(ours, wanted)))
    sides = (tensors, wide(tensors))
    losses = [OUTSIDE[name](F.linear(h, weight, bias), target) for h, weight, bias, target in sides]
    grads = [torch.autograd.grad(x, [y for y in of if y.requires_grad]) for x, of in zip(losses, sides, strict=True)]
    assert_within_law(found, *grads)


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_a_loss_outside_keeps(name: str) -> None:
    """The logits if they fit the budget, once; else nothing of their size."""
    tensors = problem(K, (True, True, True), torch.float32)
    size = K * V * 4
    for budget, kept in ((size, size), (size - 1, 0)):
        held = held_bytes(lambda budget=budget: OUTSIDE[name](_returned(tensors, budget=budget), tensors[-1]))  # type: ignore[misc]
        assert kept <= held <= kept + K * D * 4 + K * 200 + 1024
    # a function of each logit has a derivative for which the product runs again
    capped = deferred_linear(*tensors[:3], keep_logits=False) * 0.5
    assert held_bytes(lambda: OUTSIDE[name](returned_logits(capped), tensors[-1])) < size  # type: ignore[arg-type]
    # hooks would not get them
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert held_bytes(lambda: OUTSIDE[name](_returned(tensors), tensors[-1])) < size


@pytest.mark.parametrize("trained", (True, False), ids=("trained", "frozen"))
@pytest.mark.parametrize("vocabulary", LARGE)
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_loss_outside_is_exact_at_large_vocabularies(name: str, vocabulary: int, trained: bool) -> None:
    needs = (True, trained, trained)
    batches = [problem(K, needs, torch.bfloat16, d=32, v=vocabulary) for _ in range(LARGE[-1] // vocabulary)]

    def found(tensors: Any, ours: bool) -> list[Tensor]:
        logits = _returned(tensors) if ours else F.linear(*tensors[:3])
        wanted = [x for x in tensors if x.requires_grad]
        return list(torch.autograd.grad(OUTSIDE[name](logits, tensors[-1]), wanted))

    sides = (True, batches), (False, batches), (False, list(map(wide, batches)))
    assert_within_law(*(_stacked(found(batch, ours) for batch in side) for ours, side in sides))


def test_values_that_are_written_on_are_not_those_of_backward() -> None:
    tensors = problem(K, (True, True, True), torch.float32)
    logits = _returned(tensors)
    loss = _smoothed(logits, tensors[-1])
    plain(logits).detach().zero_()
    sides = (tensors, wide(tensors))
    expected = [torch.autograd.grad(_smoothed(F.linear(*of[:3]), of[-1]), of[:3]) for of in sides]
    assert_within_law(torch.autograd.grad(loss, tensors[:3]), *expected)
