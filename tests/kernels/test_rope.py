"""The rotary kernels have the reference's bits and the memory order of stock's results, and make no copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_actcompress.dispatch import use
from hf_actcompress.reference import rope_bwd, rope_fwd
from tests.kernels.harness import DEVICE, check, every_case, run
from tests.kernels.harness import samples as samples_of
from tests.oracle import assert_equal_bits

pytestmark = pytest.mark.daily(6)

Case = tuple[torch.dtype, int, int]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# the dtypes of x, and of cos and sin
DTYPES = ((FP32, FP32), (BF16, BF16), (FP16, FP16), (BF16, FP32), (FP32, BF16), (BF16, FP16))


@every_case
@pytest.mark.parametrize("name", ["rope_fwd", "rope_bwd"])
def test_bits_are_the_references(name: str, case: Case) -> None:
    for args in samples_of(name, *case):
        check(name, args, bitwise=True)


def normal(*sizes: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(sizes, device=DEVICE).to(dtype)


# B, heads, S, D: an odd half, more heads than a tile has, wide heads, no heads, one of everything
SHAPES = ((2, 3, 5, 6), (1, 70, 3, 32), (2, 2, 3, 600), (2, 0, 3, 8), (1, 1, 1, 2))


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_dtypes(shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    b, h, s, d = shape
    x = normal(b, s, h, d, dtype=dtypes[0]).transpose(1, 2)
    cos, sin = (normal(1, 1, s, d, dtype=dtypes[1]) for _ in range(2))
    y = rope_fwd(x, cos, sin)
    for name, args in (("rope_fwd", (x, cos, sin)), ("rope_bwd", (normal(*shape, dtype=y.dtype), cos, sin, x.dtype))):
        check(name, args, bitwise=True)


def layouts() -> dict[str, Tensor]:
    """x [2, 3, 5, 8] in every memory layout that models use, and in some that they do not use."""
    return {
        "dense": normal(2, 3, 5, 8),
        "heads after tokens": normal(2, 5, 3, 8).transpose(1, 2),
        "part of a projection": normal(2, 5, 3 * 3 * 8)[..., 24:48].view(2, 5, 3, 8).transpose(1, 2),
        "expanded": normal(2, 1, 5, 8).expand(2, 3, 5, 8),
        "one number": normal(1, 1, 1, 1).expand(2, 3, 5, 8),
        "columns apart": normal(2, 3, 8, 5).transpose(-1, -2),
    }


@pytest.mark.parametrize("layout", layouts())
def test_layouts(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = layouts()[layout]
    cos, sin = (normal(2, 1, 5, 8) for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "contiguous", lambda self: pytest.fail("a copy"))
        patch.setattr(Tensor, "clone", lambda self: pytest.fail("a copy"))
        (y,), (dx,) = run("rope_fwd", (x, cos, sin)), run("rope_bwd", (x, cos, sin, FP32))
    expected = rope_fwd(x, cos, sin)
    assert_equal_bits([y, dx], [expected, rope_bwd(x, cos, sin, FP32)])
    if layout != "one number":
        assert y.stride() == expected.stride()


# cases without a kernel: the reference's function runs, even under the choice "triton"
ELSEWHERE: dict[str, Any] = {
    "odd width": ((2, 3, 5, 7), (1, 1, 5, 7), FP32),
    "angles per head": ((2, 3, 5, 8), (2, 3, 5, 8), FP32),
    "three dimensions": ((3, 5, 8), (1, 5, 8), FP32),
    "very wide": ((1, 1, 2, 8192), (1, 1, 2, 8192), FP32),
    "angles in fp64": ((2, 3, 5, 8), (1, 1, 5, 8), torch.float64),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_the_reference_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_actcompress.kernels import rope

    monkeypatch.setattr(rope, "_rope", lambda *args: pytest.fail("launched"))
    shape, angles, dtype = ELSEWHERE[name]
    x, cos, sin = normal(*shape), normal(*angles, dtype=dtype), normal(*angles, dtype=dtype)
    y = rope_fwd(x, cos, sin)
    with use("triton"):
        assert_equal_bits([rope.rope_fwd(x, cos, sin)], [y])
        assert_equal_bits([rope.rope_bwd(y, cos, sin, FP32)], [rope_bwd(y, cos, sin, FP32)])


def test_offsets_beyond_32_bits() -> None:
    """Tokens are so far apart that the last one begins beyond 2^31 elements. The memory between them is not touched."""
    step = 2**31 // 4 + 8
    x = torch.empty(4 * step + 8, dtype=BF16, device=DEVICE).as_strided((1, 1, 5, 8), (0, 0, step, 1))
    x.copy_(normal(1, 1, 5, 8, dtype=BF16))
    cos, sin = (normal(1, 1, 5, 8, dtype=BF16) for _ in range(2))
    assert_equal_bits(run("rope_fwd", (x, cos, sin)), [rope_fwd(x, cos, sin)])
