"""Dropout on a CUDA device keeps seed and offset, not the generator's state. In a CUDA graph it keeps mask bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_actcompress import ops, patch_model, patch_report, reporting
from hf_actcompress.errors import CaptureError
from hf_actcompress.reference import dropout as functions
from tests.families import BODY, BY_NAME, build, differing, step
from tests.oracle import kept_bytes

P = 0.3


class _Generator:
    """A generator with an offset, as CUDA's is: each offset stands for a state of the CPU's default generator."""

    def __init__(self) -> None:
        self.seed, self.states = 2**64 - 1, []

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        state = torch.get_rng_state()
        known = [i for i, other in enumerate(self.states) if torch.equal(other, state)]
        if not known:
            self.states.append(state)
        return 4 * (known[0] if known else len(self.states) - 1)

    def set_offset(self, offset: int) -> None:
        torch.set_rng_state(self.states[offset // 4])

    def manual_seed(self, seed: int) -> None:
        self.seed = seed


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> _Generator:
    """Replaces the default generator of every device by one that has an offset."""
    found = _Generator()
    # these devices keep no small masks
    monkeypatch.setattr(functions, "_CPU_STATE", 0)
    monkeypatch.setattr(functions, "_generator", lambda device: found)

    def state(device: torch.device) -> Tensor:
        return torch.tensor(functions._seed_and_offset(found), dtype=torch.uint64)

    monkeypatch.setattr(functions, "rng_state", state)
    return found


def _run(dropout: Any, checkpointed: bool = False) -> list[Tensor]:
    """Runs two layers of dropout. Returns the output, the gradient twice, and numbers that are drawn afterwards."""
    torch.manual_seed(0)
    x = torch.randn(7, 33).requires_grad_()

    def forward(x: Tensor) -> Tensor:
        return dropout(torch.tanh(dropout(x, P)) * x, P)

    y = checkpoint(forward, x, use_reentrant=False) if checkpointed else forward(x)
    after = torch.rand(3)
    first = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    second = torch.autograd.grad(y.square().sum(), x) if not checkpointed else first
    return [y.detach(), *first, *second, after, torch.rand(3)]


@pytest.mark.parametrize(("shape", "kept"), [((50, 51), 2550), ((5055,), 5055), ((8, 632), 5056), ((200, 300), 5056)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_keeps_a_mask_or_its_state_whichever_is_less(
    shape: tuple[int, ...], kept: int, dtype: torch.dtype
) -> None:
    x, dy = torch.randn(shape, dtype=dtype).requires_grad_(), torch.randn(shape, dtype=dtype)

    def run(dropout: Any) -> list[Tensor]:
        torch.manual_seed(0)
        y = dropout(x, P)
        z = y * y
        return [z.detach(), torch.rand(3), *torch.autograd.grad(z, x, dy)]

    assert all(torch.equal(a, b) for a, b in zip(run(ops.dropout), run(torch.nn.functional.dropout), strict=True))
    assert kept_bytes(lambda: ops.dropout(x, P)) == kept


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_mask_is_stocks_and_the_generator_left_as_found(generator: _Generator, checkpointed: bool) -> None:
    expected = _run(torch.nn.functional.dropout, checkpointed)
    found = _run(ops.dropout, checkpointed)
    assert generator.states
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_another_seed_in_between(generator: _Generator) -> None:
    x = torch.ones(50, requires_grad=True)
    y = ops.dropout(x, P)
    generator.manual_seed(5)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(x.grad, y.detach()) and generator.seed == 5 and torch.equal(torch.get_rng_state(), state)


def test_sixteen_bytes_on_the_host_are_kept(generator: _Generator) -> None:
    x = torch.ones(50, 50, requires_grad=True)
    # the generator above allocates a state for each offset; this one must not be counted
    generator.get_offset()
    assert kept_bytes(lambda: ops.dropout(x, P)) == 16


def test_a_program_replays_by_offset(generator: _Generator) -> None:
    family = BY_NAME["bert"]
    stock, model = (build(family, "fp32", dropout=P) for _ in range(2))
    patch_model(model, BODY)
    loss, expected = step(stock, family.make_batch())
    found_loss, found = step(model, family.make_batch())
    assert torch.equal(found_loss, loss) and not differing(found, expected) and generator.states


def test_bits_are_kept_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _run(torch.nn.functional.dropout)
    monkeypatch.setattr(functions, "_captured", lambda device: True)
    monkeypatch.setattr(functions, "replayed_rng", None)
    # stock's scale on a CPU is rounded differently
    for found, of_stock in zip(_run(ops.dropout), expected, strict=True):
        assert torch.equal(found == 0, of_stock == 0)
        torch.testing.assert_close(found, of_stock)
    x = torch.ones(50, 50, requires_grad=True)
    assert kept_bytes(lambda: ops.dropout(x, P)) == -(-2500 // 8)
    for p in (1e-6, 1.0):
        y = ops.dropout(x, p)
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], y.detach())
    with pytest.raises(CaptureError, match="attention with dropout"):
        functions.rng_state(torch.device("cuda"))


def test_a_program_keeps_bits_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    family = BY_NAME["bert"]
    stock, model = (build(family, "fp32", dropout=P) for _ in range(2))
    patch_model(model, BODY)
    loss, expected = step(stock, family.make_batch())
    monkeypatch.setattr(functions, "_captured", lambda device: True)
    found_loss, found = step(model, family.make_batch())
    assert torch.equal(found_loss, loss)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6)


def test_the_report_says_what_no_graph_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch_model(build(BY_NAME["bert"], "fp32"))

    def rows() -> list[str]:
        return [row.reason for row in patch_report(model).rows if row.role == "cuda_graph"]

    assert not rows()
    monkeypatch.setattr(reporting, "_on_cuda", lambda model: True)
    model.config.attention_probs_dropout_prob = 0.0
    assert not rows()
    model.config.attention_probs_dropout_prob = 0.1
    (reason,) = rows()
    assert "cannot be captured" in reason
    model = patch_model(BY_NAME["t5"].build(dropout=0.1))
    assert rows() == [reason]


def test_devices_without_an_offset_keep_their_state(monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.zeros(3, dtype=torch.uint8)
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(get_rng_state=lambda _: state))
    assert functions.rng_state(torch.device("xpu")) is state


@pytest.mark.gpu
def test_on_a_gpu_as_stock_does() -> None:
    def run(dropout: Any) -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.randn(7, 33, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).requires_grad_()
        y = dropout(torch.tanh(dropout(x, P)) * x, P)
        after = torch.rand(3, device="cuda")
        return [y.detach(), *torch.autograd.grad(y.square().sum(), x), after, torch.rand(3, device="cuda")]

    assert all(torch.equal(a, b) for a, b in zip(run(ops.dropout), run(torch.nn.functional.dropout), strict=True))


@pytest.mark.gpu
def test_on_a_gpu_a_graph_has_stocks_masks() -> None:
    """Each replay draws a new mask, and the backward uses the mask of the forward."""

    def run(dropout: Any) -> list[Tensor]:
        torch.cuda.manual_seed(3)
        x = torch.randn(64, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).requires_grad_()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.autograd.grad(dropout(x, P).square().sum(), x)
        torch.cuda.current_stream().wait_stream(stream)
        graph, found = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            y = dropout(x, P)
            (grad,) = torch.autograd.grad(y.square().sum(), x)
        for _ in range(2):
            graph.replay()
            found += [y.detach().clone(), grad.clone()]
        return found

    ours, stock = run(ops.dropout), run(torch.nn.functional.dropout)
    assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True))
    assert not torch.equal(ours[0], ours[2])
