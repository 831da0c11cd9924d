"""The measurement itself: allocator events of calls whose bytes are known."""

import gc

import pytest
import torch

from hf_actcompress import StepMemory, measure_step
from hf_actcompress.errors import MeasurementError
from hf_actcompress.memory import allocator_trace, kept_bytes
from hf_actcompress.memory.measurement import allocator

N = 1 << 16


def test_net_is_what_is_held_and_peak_what_was_held_at_once():
    def call():
        first = torch.empty(N)
        second = torch.empty(2 * N)
        del first
        return second

    seen = allocator_trace(call)
    assert (seen.net_bytes, seen.peak_bytes, seen.events) == (8 * N, 12 * N, 3)


def test_blocks_of_before_are_left_out_even_at_an_address_of_an_earlier_trace():
    # the profiler remembers sizes by address, and the allocator uses the same addresses again
    for size in (N, 2 * N, N):
        allocator_trace(lambda size=size: [torch.empty(size) for _ in range(4)])
    held = [torch.empty(N) for _ in range(4)]
    assert allocator_trace(held.clear).net_bytes == 0
    held = [torch.empty(2 * N) for _ in range(4)]

    def swap():
        held.clear()
        return torch.empty(N)

    seen = allocator_trace(swap)
    assert (seen.net_bytes, seen.peak_bytes) == (4 * N, 4 * N)


def test_the_same_call_gives_the_same_bytes():
    x = torch.randn(64, 64, requires_grad=True)

    def call():
        return (torch.nn.functional.gelu(x @ x) @ x).sum()

    assert allocator_trace(call) == allocator_trace(call)


def test_cycles_are_not_held_and_collection_is_restored():
    def call():
        loop: list[object] = [torch.empty(N)]
        loop.append(loop)

    garbage: list[object] = [torch.empty(N)]
    garbage.append(garbage)
    del garbage
    seen = allocator_trace(call)
    assert (seen.net_bytes, seen.peak_bytes) == (0, 4 * N)
    assert gc.isenabled()


def test_measure_step_counts_above_the_start():
    weight = torch.randn(256, 256, requires_grad=True)

    def step():
        (weight * 2).square().sum().backward()

    first, second = measure_step(step, "cpu"), measure_step(step, "cpu")
    assert isinstance(first, StepMemory)
    assert first.left_bytes == weight.nbytes
    assert second.left_bytes == 0
    # the doubled weight, its square and the gradients on the way back
    assert 2 * weight.nbytes <= second.peak_bytes <= 5 * weight.nbytes


def test_kept_bytes_is_what_backward_needs_and_the_loss():
    x = torch.randn(N, requires_grad=True)

    class Output:
        def __init__(self) -> None:
            self.logits = x.neg()
            self.loss = self.logits.exp().sum()

    # exp keeps its output; the logits are freed; the loss is one float
    assert kept_bytes(Output, "cpu") == x.nbytes + 4
    assert kept_bytes(lambda: Output().loss, torch.device("cpu")) == x.nbytes + 4


def test_an_output_without_a_loss_is_refused():
    with pytest.raises(MeasurementError, match="labels"):
        kept_bytes(lambda: {"logits": torch.zeros(3)}, "cpu")


def test_other_devices_are_refused():
    with pytest.raises(MeasurementError, match="meta"):
        measure_step(lambda: None, "meta")


def test_a_profiler_of_another_form_is_an_error_and_not_zero_bytes():
    with pytest.raises(MeasurementError, match="torch"):
        allocator.allocator_events(object())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_counts_the_same_bytes():
    x = torch.randn(N, device="cuda", requires_grad=True)
    assert kept_bytes(lambda: x.neg().exp().sum(), "cuda") == x.nbytes + 512
    assert measure_step(lambda: torch.empty(N, device="cuda"), "cuda") == StepMemory(4 * N, 0)
