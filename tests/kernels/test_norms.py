"""The norms' kernels against the reference and fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_actcompress import reference
from hf_actcompress.kernels import rms_norm
from tests.kernels.harness import DEVICE, check, every_case, launched, present, run, samples, specified
from tests.oracle import assert_equal_bits

pytestmark = pytest.mark.daily(6)

Case = tuple[torch.dtype, int, int]
Terms = list[Tensor | None]


@every_case
@pytest.mark.parametrize("name", ["rms_norm_fwd", "rms_norm_rebuild"])
def test_rms_norm_values_are_the_references(name: str, case: Case) -> None:
    for args in samples(name, *case):
        check(name, args, bitwise=True)


# rows, width, and torch's block for them: lanes of a row and, if they share it, warps (Reduce.cuh, setReduceConfig)
REDUCTIONS = (
    (20, 128, 32, 1), (20, 768, 32, 1), (17, 4096, 32, 1), (40, 5120, 32, 1), (16, 8192, 32, 16), (19, 12288, 32, 16),
    (3, 260, 64, 1), (5, 4096, 128, 1), (5, 12288, 128, 4), (1, 4096, 512, 1), (1, 16384, 512, 1),
)  # fmt: skip


def torchs_sum(values: np.ndarray, lanes: int, warps: int) -> np.float32:
    """A row's sum in fp32 as the threads of torch's reduction on a GPU make it, in steps of all threads at once."""
    threads = lanes * warps
    fours = np.zeros((-(-len(values) // (4 * threads)), threads, 4), np.float32)
    fours.reshape(-1)[: len(values)] = values
    own = np.zeros((threads, 4), np.float32)
    for four in fours:
        own = own + four
    found = (((own[:, 0] + own[:, 1]) + own[:, 2]) + own[:, 3]).reshape(warps, lanes)
    # lanes first (block_x_reduce): those beyond 32 through shared memory
    while found.shape[1] > 32:
        found = found[:, : found.shape[1] // 2] + found[:, found.shape[1] // 2 :]
    # then shuffles: a lane without a partner adds its own value, and its result is not used
    for offset in (16, 8, 4, 2, 1):
        found = found + np.concatenate([found[:, offset:], found[:, -offset:]], axis=1)
    # then warps (block_y_reduce)
    column = found[:, 0]
    while len(column) > 1:
        column = column[: len(column) // 2] + column[len(column) // 2 :]
    return np.float32(column[0])


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_in_one_kernel_sums_as_torch_does(
    reduction: tuple[int, int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, width, *block = reduction
    x, weight = (3 * torch.randn(rows, width, device=DEVICE)).to(dtype), torch.randn(width, device=DEVICE)
    passes = run("rms_norm_fwd", (x, weight, 1e-6, "weight_in_fp32"))
    monkeypatch.setattr(rms_norm, "_repeats_torch", lambda x: True)
    y, rstd = run("rms_norm_fwd", (x, weight, 1e-6, "weight_in_fp32"))
    sums = [torchs_sum(np.square(row), *block) for row in x.float().cpu().numpy()]
    mean = np.array(sums, np.float32) * (np.float32(rows) / np.float32(rows * width))
    expected = np.float32(1) / np.sqrt(mean + np.float32(1e-6))
    if not torch.cuda.is_available():
        assert_equal_bits([rstd.view(-1)], [torch.from_numpy(expected)])
        # the order is not that of several passes, whose sums differ
        assert rows < 16 or not torch.equal(rstd, passes[1])
    torch.testing.assert_close(rstd, passes[1], rtol=1e-6, atol=0)
    assert_equal_bits([y], [reference.rms_norm_rebuild(x, rstd, weight, "weight_in_fp32")])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_in_one_kernel_has_every_formula(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rms_norm, "_repeats_torch", lambda x: True)
    # only one kernel may be launched
    monkeypatch.setattr(rms_norm, "_rms_norm_square", None)
    monkeypatch.setattr(rms_norm, "_rebuild_kernel", None)
    for x, weight, eps, formula in samples("rms_norm_fwd", dtype, 21, 132):
        y, rstd = run("rms_norm_fwd", (x, weight, eps, formula))
        assert_equal_bits([y], [reference.rms_norm_rebuild(x, rstd, weight, formula)])


@pytest.mark.gpu
@pytest.mark.parametrize("width", [128, 768, 1024, 2048, 3072, 4096, 5120, 8192, 12288, 16384])
def test_this_gpu_sums_in_that_order(width: int) -> None:
    """If this fails, RMSNorm's forward is still right, but runs in several passes."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rows in (1, 5, 16, 100):
            assert rms_norm._probe_order(DEVICE, dtype, rows, width), (dtype, rows)


class _OnGpu:
    """The attributes of a CUDA tensor that are read before the order of its sum is tried."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16, contiguous: bool = True) -> None:
        self.x, self.contiguous = torch.empty(shape, dtype=dtype, device="meta"), contiguous

    is_cuda = True

    def is_contiguous(self) -> bool:
        return self.contiguous

    def __getattr__(self, name: str) -> Any:
        return getattr(self.x, name)


def test_order_is_tried_once_for_what_decides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[torch.dtype, int, int]] = []

    def probe(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> bool:
        tried.append((dtype, rows, width))
        return width == 4096

    monkeypatch.setattr(rms_norm, "_probe_order", probe)
    monkeypatch.setattr(rms_norm, "_repeats", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    takes = rms_norm._repeats_torch
    for _ in range(2):
        assert takes(_OnGpu(2, 20, 4096)) and takes(_OnGpu(7000, 4096)) and not takes(_OnGpu(20, 8192))
        assert takes(_OnGpu(20, 4096, dtype=torch.float32)) and takes(_OnGpu(2, 4096))
    assert tried == [
        (torch.bfloat16, 40, 4096), (torch.bfloat16, 20, 8192), (torch.float32, 20, 4096), (torch.bfloat16, 2, 4096),
    ]  # fmt: skip
    for x in (_OnGpu(20, 64), _OnGpu(20, 130), _OnGpu(0, 4096), _OnGpu(20, 20480), _OnGpu(20, 4096, contiguous=False)):
        assert not takes(x)
    assert not takes(torch.ones(20, 4096)) and len(tried) == 4
    # for 1 row a block has 512 lanes, and for 4000 rows 16 warps of 32 lanes: as many threads in another order
    assert not takes(_OnGpu(1, 16384)) and not takes(_OnGpu(4000, 16384)) and len(tried) == 6
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not takes(_OnGpu(20, 2048)) and takes(_OnGpu(20, 4096)) and len(tried) == 6


def test_another_order_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU sums in another order, which the probe finds out. It does not draw from the default generator."""
    state = torch.get_rng_state()
    assert torch.cuda.is_available() or not rms_norm._probe_order(torch.device("cpu"), torch.float32, 20, 1024)
    assert torch.equal(torch.get_rng_state(), state)

    def does_not_compile(*args: Any) -> None:
        raise RuntimeError("ptxas failed")

    monkeypatch.setattr(rms_norm, "_rms_norm_fwd", does_not_compile)
    assert not rms_norm._probe_order(DEVICE, torch.float32, 20, 1024)
    monkeypatch.setattr(
        rms_norm, "_rms_norm_fwd", lambda x, *_: (x, torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6))
    )
    assert rms_norm._probe_order(DEVICE, torch.float32, 20, 1024)


def norm_terms(dnormed: Tensor, dy: Tensor, normed: Tensor, rstd: Tensor, centred: bool = True) -> Terms:
    """The magnitudes of the terms of dx, dweight and dbias."""
    direct = dnormed.abs()
    dx = direct + (direct * normed.abs()).mean(-1, keepdim=True) * normed.abs()
    if centred:
        dx = dx + direct.mean(-1, keepdim=True)
    return [dx * rstd, (dy * normed).abs().sum(0), dy.abs().sum(0)]


def gain_of(weight: Tensor | None, formula: str = "") -> Tensor:
    if weight is None:
        return torch.ones((), dtype=torch.float64)
    return 1 + weight if formula == "one_plus_weight" else weight


def rms_norm_terms(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, formula: str, needed: Any, dresidual: Any = None
) -> Terms:
    return norm_terms(dy * gain_of(weight, formula), dy, x * rstd, rstd, centred=False)[:2]


def layer_norm_terms(
    dy: Tensor, x: Tensor, shape: Any, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Any, needed: Any,
    dresidual: Any = None,
) -> Terms:  # fmt: skip
    # a rounding error of x - mean is relative to the larger of the two
    normed = (x.abs() + mean.abs()) * rstd
    return norm_terms(dy * gain_of(weight), dy, normed, rstd)


def layer_norm_output_terms(
    dy: Tensor, y: Tensor, shape: Any, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, needed: Any
) -> Terms:
    gain = gain_of(weight)
    normed = (y.abs() + (0 if bias is None else bias.abs())) / torch.where(gain == 0, 1.0, gain).abs()
    return norm_terms(dy * gain, dy, normed.clamp(max=y.size(-1) ** 0.5), rstd)


def rms_norm_output_terms(
    dy: Tensor, y: Tensor, weight: Tensor | None, rstd: Tensor, formula: str, needed: Any
) -> Terms:
    gain = gain_of(weight, formula)
    normed = (y / torch.where(gain == 0, 1.0, gain)).abs().clamp(max=y.size(-1) ** 0.5)
    return norm_terms(dy * gain, dy, normed, rstd, centred=False)[:2]


TERMS = {
    "layer_norm_bwd": layer_norm_terms,
    "layer_norm_output_bwd": layer_norm_output_terms,
    "rms_norm_bwd": rms_norm_terms,
    "rms_norm_output_bwd": rms_norm_output_terms,
}
every_backward = pytest.mark.parametrize("name", TERMS)


@every_case
@every_backward
def test_backward(name: str, case: Case) -> None:
    for args in samples(name, *case):
        check(name, args, TERMS[name])


# rows that are too wide for the registers. Seven of them need tiles of two rows, a block of columns that is not full,
# and two tiles for one program
WIDE = 8200


@every_backward
def test_backward_of_wide_rows(name: str) -> None:
    for args in list(samples(name, torch.float32, 7, WIDE))[:2]:
        check(name, args, TERMS[name])


@pytest.mark.parametrize("width", [9, WIDE])
@every_backward
def test_backward_returns_what_is_needed(name: str, width: int) -> None:
    *args, needed = next(
        args for args in samples(name, torch.float32, 5, width) if all(args[-1]) and all(x is not None for x in args)
    )
    everything = run(name, (*args, needed))
    for wanted in range(2 ** len(needed)):
        bits = tuple(bool(wanted >> i & 1) for i in range(len(needed)))
        assert [x is not None for x in specified(name, (*args, bits))] == [
            x is not None for x in run(name, (*args, bits))
        ]
        for x, y in zip(run(name, (*args, bits)), everything, strict=True):
            assert x is None or y is None or torch.equal(x, y)


@pytest.mark.parametrize("width", [9, WIDE])
@pytest.mark.parametrize("name", ["layer_norm_bwd", "rms_norm_bwd"])
def test_gradient_beside_the_norm_is_added_in_the_same_pass(name: str, width: int) -> None:
    """The result has the bits of a sum that is computed afterwards."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        *args, _ = list(samples(name, dtype, 5, width))[-1]
        alone = run(name, tuple(args))
        for dresidual in (torch.randn_like(args[1]), torch.randn_like(args[1][:1]).expand_as(args[1])):
            with launched() as launches:
                dx, *rest = run(name, (*args, dresidual))
            assert sum(kernel.endswith("norm_bwd_kernel") for kernel, _ in launches) == 1
            assert_equal_bits(present([dx, *rest]), present([dresidual + alone[0], *alone[1:]]))


@pytest.mark.parametrize("name", ["rms_norm_fwd", *TERMS])
def test_a_row_too_wide_for_a_kernel_is_the_references(name: str) -> None:
    args = next(samples(name, torch.float32, 2, 16385))
    assert_equal_bits(present(run(name, args)), present(specified(name, args)))


def test_layer_norm_over_two_dimensions() -> None:
    dy, x, _, mean, rstd, weight, bias, needed = next(samples("layer_norm_bwd", torch.float32, 5, 12))
    shape = (3, 4)
    dy, x, weight, bias = dy.view(5, *shape), x.view(5, *shape), weight.view(shape), bias.view(shape)
    args = (dy, x, shape, mean[..., None], rstd[..., None], weight, bias, needed)
    for ours, stock in zip(run("layer_norm_bwd", args), specified("layer_norm_bwd", args), strict=True):
        torch.testing.assert_close(ours, stock)
