"""memory_timeline of steps whose bytes are known; it agrees with the other measurements."""

import json

import pytest
import torch

from hf_actcompress.errors import MeasurementError
from hf_actcompress.memory import MemoryTimeline, kept_bytes, measure_step, memory_timeline

N = 1 << 14


def model_and_step():
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(256, 64)

    def forward():
        return model(x).square().mean()

    def step():
        forward().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    step()
    return forward, step


def test_known_bytes_at_known_times():
    x = torch.randn(N, requires_grad=True)
    x.grad = torch.zeros(N)

    def step():
        # exp keeps its output; the sum is one float
        x.exp().sum().backward()

    seen = memory_timeline(step, "cpu")
    # the output and the sum; torch makes the gradient of the sum, 4 bytes, before its engine starts
    assert seen.kept_bytes == 4 * N + 8
    # at the peak there is also the product of the output and its gradient; that is expanded, so it takes no memory
    assert seen.peak_bytes == 8 * N + 8
    assert seen.left_bytes == 0
    assert seen.backward is not None and seen.backward[0] < seen.peak_seconds < seen.backward[1]
    assert seen.optimizer is None
    assert seen.at(-1.0) == 0 and seen.at(seen.seconds[0]) == seen.bytes[0] == 4 * N


def test_agrees_with_the_other_rulers():
    forward, step = model_and_step()
    seen, counted = memory_timeline(step, "cpu"), measure_step(step, "cpu")
    assert (seen.peak_bytes, seen.left_bytes) == (counted.peak_bytes, counted.left_bytes)
    assert kept_bytes(forward, "cpu") == seen.kept_bytes - 4


def test_rises_in_forward_and_falls_in_backward():
    _, step = model_and_step()
    seen = memory_timeline(step, "cpu")
    assert seen.backward is not None and seen.optimizer is not None
    assert seen.seconds == tuple(sorted(seen.seconds))
    start, end = seen.backward
    activation = 4 * 256 * 64
    # each layer adds its output, and the loss a square
    assert list(seen.bytes[:9]) == [activation * count for count in range(1, 10)]
    # the square is freed at once; then there are the loss and its gradient
    assert seen.at(start) == seen.kept_bytes == 8 * activation + 8
    assert seen.at(end) < seen.kept_bytes and end <= seen.optimizer[0]


def test_says_where_the_peak_was():
    times, sizes = (0.0, 1.0, 2.0, 3.0), (100, 300, 200, 0)
    assert "in forward" in str(MemoryTimeline(times, sizes, (1.5, 2.5)))
    assert "in backward" in str(MemoryTimeline(times, sizes, (0.5, 2.5)))
    assert "optimizer" in str(MemoryTimeline(times, sizes, (0.2, 0.5), (0.6, 2.0)))


def test_an_empty_step_and_json():
    empty = memory_timeline(lambda: None, "cpu")
    assert (empty.peak_bytes, empty.kept_bytes, empty.left_bytes, empty.peak_seconds) == (0, 0, 0, 0.0)
    x = torch.randn(N, requires_grad=True)
    data = json.loads(memory_timeline(lambda: x.exp().sum().backward(), "cpu").to_json())
    assert data["peak_bytes"] == max(data["bytes"]) and data["backward"][0] < data["backward"][1]
    # the gradient did not exist before the step
    assert data["left_bytes"] == x.nbytes


def test_other_devices_are_refused():
    with pytest.raises(MeasurementError, match="meta"):
        memory_timeline(lambda: None, "meta")


@pytest.mark.gpu
def test_on_a_card():
    x = torch.randn(N, device="cuda", requires_grad=True)
    x.exp().sum().backward()
    seen = memory_timeline(lambda: x.exp().sum().backward(), "cuda")
    assert seen.peak_bytes >= 8 * N and seen.left_bytes == 0
    assert seen.backward is not None
