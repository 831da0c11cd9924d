"""Checks for every kernel, on a GPU if there is one, and otherwise in Triton's interpreter.

A kernel's test calls `check(name, ...)` for the shapes and dtypes it wants; arguments come from the module's own
SAMPLES. The specification is the function of `reference/`, run at the dtype (stock) and in fp64 (the oracle).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_actcompress.dispatch import implementation, use
from hf_actcompress.kernels import KERNELS
from hf_actcompress.reference.table import FUNCTIONS
from tests.oracle import EXACT, assert_equal_bits

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpretedFunction  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from hf_actcompress.kernels import launch  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# dtype, rows and width: one element, odd, in several tiles, a row wider than a tile
CASES = (
    (torch.bfloat16, 1, 1),
    (torch.float32, 13, 7),
    *((dtype, 37, 129) for dtype in DTYPES),
    (torch.bfloat16, 3, 2500),
)
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
Args = tuple[Any, ...]
# magnitude of the terms of each result that is a sum, from the oracle's arguments
Terms = Callable[..., list[Tensor | None]]


def samples(name: str, dtype: torch.dtype, rows: int, width: int) -> Iterator[Args]:
    module = importlib.import_module(f"hf_actcompress.{KERNELS[name]}")
    yield from module.SAMPLES[name](DEVICE, dtype, rows, width)


def run(name: str, args: Args) -> list[Tensor | None]:
    """The kernel's results. Memory that it allocates is filled with NaN first."""
    tensor = next(x for x in args if isinstance(x, Tensor))
    with use("triton"), poisoned():
        return flat(implementation(name, tensor)(*args))


@contextmanager
def launched() -> Iterator[list[tuple[str, int]]]:
    """The kernels that are launched while the block runs: (name, bytes of the tensors that the kernel gets).

    A tensor may be passed a second time, in place of one that the kernel does not need. It counts once.
    """
    found: list[tuple[str, int]] = []

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        handed = {id(x): x.numel() * x.element_size() for x in (*args, *options.values()) if isinstance(x, Tensor)}
        found.append((kernel.__name__, sum(handed.values())))
        return runs[type(kernel)](kernel, *args, grid=grid, warmup=warmup, **options)

    runs = {kind: kind.run for kind in (JITFunction, InterpretedFunction)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "enabled", False)
        for kind in runs:
            patch.setattr(kind, "run", note)
        yield found


def moved(name: str, *args: Any) -> int:
    """The bytes that the kernel `name` reads and writes for these arguments, counted from its launches."""
    # the first run does what is done only once, such as a probe, which must not be counted
    run(name, args)
    with launched() as launches:
        run(name, args)
    return sum(size for _, size in launches)


def specified(name: str, args: Args) -> list[Tensor | None]:
    return flat(FUNCTIONS[name](*args))


def flat(result: Any) -> list[Tensor | None]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


@contextmanager
def poisoned() -> Iterator[None]:
    """torch.empty fills memory with NaN and the largest integers, so that a test sees what a kernel does not write."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def wide(args: Args) -> Args:
    return tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)


def check(name: str, args: Args, terms: Terms | None = None, bitwise: bool = False) -> None:
    """Check a kernel's results: they are within the law, or have the reference's bits if `bitwise`.

    They must be the same in a second run and for other layouts, and the arguments must not change.
    """
    before = [x.clone() for x in args if isinstance(x, Tensor)]
    ours, stock = run(name, args), specified(name, args)
    assert_equal_bits([x for x in args if isinstance(x, Tensor)], before)
    assert [x is None for x in ours] == [x is None for x in stock]
    if bitwise:
        assert_equal_bits(present(ours), present(stock))
    else:
        assert_law(ours, stock, specified(name, wide(args)), terms(*wide(args)) if terms else [None] * len(ours))
    assert_equal_bits(present(run(name, args)), present(ours))
    other = scattered(args)
    # for another layout the reference may sum in another order, and a bitwise kernel must give the same bits even then
    assert_equal_bits(present(run(name, other)), present(specified(name, other) if bitwise else ours))


def assert_law(
    ours: Sequence[Tensor | None],
    stock: Sequence[Tensor | None],
    oracle: Sequence[Tensor | None],
    terms: Sequence[Tensor | None],
) -> None:
    """Law 2. Stock's error counts as at least one fp32 rounding of each term and one rounding of the result."""
    for index, (a, b, truth, summed) in enumerate(zip(ours, stock, oracle, terms, strict=True)):
        if a is None or b is None or truth is None:
            continue
        assert a.dtype == b.dtype and a.shape == b.shape, f"{index}: {a.dtype} {a.shape} {b.dtype} {b.shape}"
        error, own = (a.double() - truth).norm(), (b.double() - truth).norm()
        floor = torch.finfo(a.dtype).eps / 2 * truth.norm()
        if summed is not None:
            floor = floor + torch.finfo(torch.float32).eps / 2 * summed.norm()
        assert error <= EXACT * max(own, floor), f"{index}: error {error:.3g}, stock {own:.3g}, floor {floor:.3g}"


def present(results: Sequence[Tensor | None]) -> list[Tensor]:
    return [x for x in results if x is not None]


def scattered(args: Args) -> Args:
    """The same values in other layouts: transposed, and every second column of a wider tensor."""

    def scatter(index: int, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() < 2 or not x.is_floating_point():
            return x
        if index % 2:
            return x.transpose(-1, -2).contiguous().transpose(-1, -2)
        return torch.stack([x, x], dim=-1)[..., 0]

    return tuple(scatter(index, x) for index, x in enumerate(args))
