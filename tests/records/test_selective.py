"""Modules whose code runs again in backward, but not their linear layers: bits are stock's, fewer bytes are kept."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from hf_actcompress import CompressionConfig, patch_model, patch_report, unpatch_model
from hf_actcompress.modules.base import settings_of
from hf_actcompress.records import live_entries
from tests.oracle import assert_equal_bits, kept_bytes

WIDTH, LENGTH = 32, 40


class Attention(nn.Module):
    """Attention as many models write it: three products, softmax, dropout, a position bias that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.bias = nn.Parameter(torch.linspace(-1, 1, LENGTH))
        self.drop = nn.Dropout(0.2)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], 4, 8).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, others: dict[str, Any] | None = None) -> Any:
        q, k, v = (self.heads(layer(x)) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) * 8**-0.5 + self.bias
        if mask is not None:
            scores = scores + mask.to(x.dtype)
        if others is not None:
            scores = scores + others["more"][0].to(x.dtype)
        probs = self.changed(scores.softmax(-1))
        y = (self.drop(F.dropout(probs, 0.1, self.training)) @ v).transpose(1, 2).reshape(x.shape)
        return self.out(y), probs

    def changed(self, probs: Tensor) -> Tensor:
        return probs


class Writing(Attention):
    """Writes on what a linear layer has returned."""

    def heads(self, x: Tensor) -> Tensor:
        return super().heads(F.relu(x, inplace=True))


class Random(Attention):
    """Draws from a generator that is not torch's."""

    def changed(self, probs: Tensor) -> Tensor:
        return probs * (1 + random.random())


class Spoiling(Attention):
    """Writes on what softmax has saved, for which stock's backward raises."""

    def changed(self, probs: Tensor) -> Tensor:
        return probs.mul_(2)


class Layer(nn.Module):
    def __init__(self, kind: type[Attention] = Attention) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.attention = nn.LayerNorm(WIDTH), kind()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y: Tensor = x + self.attention(self.norm(x), *args, **kwargs)[0]
        return y


def step(model: nn.Module, *args: Any, **kwargs: Any) -> list[Tensor]:
    """The gradients of two micro-steps, the second with another backward over the same graph."""
    torch.manual_seed(7)
    x = torch.linspace(-1, 1, 2 * LENGTH * WIDTH).sin().view(2, LENGTH, WIDTH)
    x = x.to(next(model.parameters()).dtype).requires_grad_()
    model(x, *args, **kwargs).square().sum().backward()
    loss = model(x, *args, **kwargs).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def kept(model: nn.Module, *args: Any) -> int:
    x = torch.randn(2, LENGTH, WIDTH, dtype=next(model.parameters()).dtype, requires_grad=True)
    model(x, *args)  # the first call tries whether it may run again
    return kept_bytes(lambda: model(x, *args))


def runs_again(model: Any) -> bool:
    rows = [row for row in patch_report(model).rows if row.role == "selective"]
    return bool(rows) and not any(row.note for row in rows)


MASK = torch.zeros(2, 1, LENGTH, LENGTH)
MASK[0, :, :, 30:] = -1e4
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "plain": ((), {}),
    "mask": ((MASK,), {}),
    "nested": ((), {"others": {"more": [MASK], "name": "x"}}),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("how", ["fp32", "bf16", "autocast", "eval"])
def test_gradients_are_stocks_bits(call: str, how: str) -> None:
    args, kwargs = CALLS[call]
    results = []
    for model in (Layer(), patch_model(Layer())):
        model = model.bfloat16() if how == "bf16" else model.train(how != "eval")
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            results.append(step(model, *args, **kwargs))
    assert_equal_bits(*results)
    assert runs_again(model) and live_entries() == 0


def test_the_products_with_weights_run_once() -> None:
    class Counted(TorchDispatchMode):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.seen: Counter[str] = Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    counts = []
    for model in (Layer(), patch_model(Layer())):
        step(model)
        with Counted() as counted:
            step(model)
        counts.append(counted.seen)
    weights, softmax = ([count["addmm"] + count["mm"] for count in counts], [count["_softmax"] for count in counts])
    assert weights[0] == weights[1]
    # softmax runs again in the backwards of both micro-steps, and in the second backward
    assert softmax == [2, 5]


def test_what_it_keeps() -> None:
    full, ours = kept(Layer()), kept(patch_model(Layer()))
    off = kept(patch_model(Layer(), CompressionConfig(selective=False, plans=False)))
    probabilities = 2 * 4 * LENGTH * LENGTH * 4
    # without selective, the net keeps one of the four tensors of this size, and the two masks as bits
    assert ours < off - probabilities < full - 3 * probabilities
    # q, k, v, the context, the norm's input and statistics, and the state of the generator
    hidden = 2 * LENGTH * WIDTH * 4
    assert ours <= 5.1 * hidden + 5056
    assert kept(patch_model(Layer(), "int8")) < 0.5 * (ours - 5056) + 5056


@pytest.mark.parametrize("frozen", ["q k v out", "q k v out bias", "norm", "v", "q k bias"])
def test_frozen_weights(frozen: str) -> None:
    results = []
    for model in (Layer(), patch_model(Layer())):
        for name, p in model.named_parameters():
            p.requires_grad_(not any(f".{part}" in f".{name}" for part in frozen.split()))
        results.append(step(model))
    assert_equal_bits(*results)


def test_a_layer_whose_output_is_written_on_runs_again() -> None:
    assert_equal_bits(step(Layer(Writing)), step(ours := patch_model(Layer(Writing))))
    assert runs_again(ours) and kept(ours) < kept(patch_model(Layer(Writing), CompressionConfig(selective=False)))


def test_a_module_that_draws_elsewhere_does_not_run_again() -> None:
    results = []
    for model in (Layer(Random), patch_model(Layer(Random))):
        random.seed(3)
        results.append(step(model))
    assert_equal_bits(*results)
    assert not runs_again(model) and "second run" in str(patch_report(model))


def test_a_write_in_place_is_stocks_error() -> None:
    for model in (Layer(Spoiling), patch_model(Layer(Spoiling))):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(model)


def test_an_input_that_is_written_on_later() -> None:
    """Stock does not save the mask, so it would raise no error."""
    model, mask = patch_model(Layer()), MASK.clone()
    y = model(torch.randn(2, LENGTH, WIDTH, requires_grad=True), mask)
    mask.zero_()
    with pytest.raises(RuntimeError, match=r"written on since.*selective=False"):
        y.sum().backward()


def _fails(model: nn.Module, args: Any) -> None:
    raise ValueError("no")


def test_nothing_outlives_the_graph() -> None:
    model = patch_model(Layer())
    step(model)
    handle = model.attention.out.register_forward_pre_hook(_fails)
    with pytest.raises(ValueError, match="no"):
        step(model)
    handle.remove()
    x = torch.randn(2, LENGTH, WIDTH, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        y, probs = model.attention(model.norm(x))
        z = model(x)
        storages = [weakref.ref(t.untyped_storage()) for t in (y, probs, z)]
        (y.sum() + z.sum()).backward()
        del y, probs, z
        assert all(held() is None for held in storages)
    finally:
        gc.enable()
    assert live_entries() == 0


def test_hooks_inside_see_one_call() -> None:
    """As in stock: the module does not run again while somebody watches its layers."""
    calls: list[object] = []
    model = patch_model(Layer())
    model.attention.q.register_forward_hook(lambda *given: calls.append(given))
    step(model)
    assert len(calls) == 2


def _saved_on_cpu(model: nn.Module, x: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return model(x)


RUNS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "twice": lambda model, x: model(model(x)),
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "reentrant": lambda model, x: checkpoint(model, x, use_reentrant=True),
    "saved on cpu": _saved_on_cpu,
}


@pytest.mark.parametrize("name", RUNS)
def test_in_company(name: str) -> None:
    class Run(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def forward(self, x: Tensor) -> Any:
            return RUNS[name](self.layer, x)

    assert_equal_bits(step(Run()), step(patch_model(Run())))


def test_a_part_of_the_gradients_and_both_outputs() -> None:
    """The probabilities are an output, too, and a backward over a part of the graph leaves nothing wrong behind."""
    results = []
    for model in (Layer(), patch_model(Layer())):
        torch.manual_seed(2)
        y, probs = model.attention(torch.linspace(-1, 1, 2 * LENGTH * WIDTH).view(2, LENGTH, WIDTH).requires_grad_())
        weights = [model.attention.v.weight, model.attention.q.weight]
        first = torch.autograd.grad(y.sum(), weights[:1], retain_graph=True)
        results.append([*first, *torch.autograd.grad(y.square().sum() + probs.square().sum(), weights)])
    assert_equal_bits(*results)


def test_copies_and_unpatching() -> None:
    model = patch_model(Layer())
    expected = step(Layer())
    step(model)
    model.zero_grad()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert settings_of(other.attention) is not None
        assert_equal_bits(step(other), expected)
    unpatch_model(model)
    assert type(model.attention) is Attention and not [k for k in vars(model.attention) if "actcompress" in k]
    assert_equal_bits(step(model), expected)
