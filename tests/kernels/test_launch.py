"""Launches without Triton's search: the code that Triton would choose, with the same arguments."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime.jit import native_specialize_impl  # noqa: E402

from hf_actcompress.kernels import launch  # noqa: E402
from hf_actcompress.kernels.launch import CachedLaunches, kinds_and_values  # noqa: E402

ALIGNED = torch.zeros(32)
ARGUMENTS = [
    *(ALIGNED, ALIGNED[1:], ALIGNED.bfloat16(), ALIGNED.half(), ALIGNED.bfloat16()[3:], ALIGNED.to(torch.uint8)),
    *(ALIGNED.long(), ALIGNED.bool(), ALIGNED.to(torch.float8_e4m3fn)),
    *(0, 1, 2, 15, 16, 48, -1, -16, 2**31 - 1, 2**31, 2**31 + 16, 2**40, 2**40 + 1, 0.5, 16.0, True, False),
]


def kind_of(x: Any) -> Any:
    return tuple(kinds_and_values((x,))[0])


def triton_kind(x: Any) -> Any:
    return native_specialize_impl(make_backend(GPUTarget("cuda", 90, 32)), x, False, True, True)


def test_what_triton_compiles_apart_is_kept_apart() -> None:
    for a, b in combinations(ARGUMENTS, 2):
        assert kind_of(a) != kind_of(b) or triton_kind(a) == triton_kind(b), (a, b)
    kinds = {kind_of(x) for x in ARGUMENTS}
    assert len(kinds) < len(ARGUMENTS), "nothing is found twice"


class _Compiled:
    """Compiled code that notes how it is launched: past Triton's own code, or through it."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, number: int) -> None:
        self.number, self.launches, self.by_triton = number, [], []

    def run(self, x: int, y: int, z: int, stream: int, function: str, metadata: str, *args: Any) -> None:
        assert (stream, function, metadata, args[:3]) == ("stream of 0", "function", "metadata", (None, None, None))
        self.launches.append(((x, y, z), args[3:]))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.by_triton.append((grid, args))


class _Driver:
    """Triton's driver for a machine with a GPU."""

    active: Any

    def get_current_stream(self, device: int) -> str:
        return f"stream of {device}"


_Driver.active = _Driver()


class _OnDevice(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    device = torch.device("cuda:0")  # type: ignore[assignment]


class _Jit:
    """A kernel with two arguments and two constants; each search returns new code."""

    __name__, arg_names = "_jit", ("x_ptr", "n", "A", "B")

    def __init__(self) -> None:
        self.found: list[_Compiled] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def search(*args: Any, **options: Any) -> _Compiled:
            self.found.append(_Compiled(len(self.found)))
            return self.found[-1]

        return search


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> CachedLaunches:
    monkeypatch.setattr(launch, "CompiledKernel", _Compiled)
    monkeypatch.setattr(launch, "driver", _Driver)
    return CachedLaunches(_Jit())


def test_a_second_launch_searches_nothing(kernel: CachedLaunches) -> None:
    """The grid has three numbers, and constants are in the kernel's order, whatever the order of the call. A tensor is
    given as its address."""
    x = ALIGNED.as_subclass(_OnDevice)
    for n in (32, 64):
        kernel[(n,)](x, n, B=7, num_warps=4, A=3)
    (code,) = kernel.jit.found
    assert code.launches == [((64, 1, 1), (ALIGNED.data_ptr(), 64, 3, 7))] and not code.by_triton


@pytest.mark.parametrize("why", ["a profiler", "no NVIDIA GPU"])
def test_launches_that_triton_makes_itself(why: str, kernel: CachedLaunches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's profiler sees tensors, and launchers of other makers take no addresses."""
    x = ALIGNED if why == "no NVIDIA GPU" else ALIGNED.as_subclass(_OnDevice)
    if why == "a profiler":
        monkeypatch.setattr(launch.knobs.runtime.launch_enter_hook, "calls", [print])
    for _ in range(2):
        kernel[(5,)](x, 32, A=3, B=7)
    (code,) = kernel.jit.found
    ((grid, (given, *numbers)),) = code.by_triton
    assert grid == (5, 1, 1) and given is x and numbers == [32, 3, 7] and not code.launches


@pytest.mark.parametrize(
    ("x", "n", "options"),
    [
        (ALIGNED[1:], 32, {}),
        (ALIGNED.bfloat16(), 32, {}),
        (ALIGNED, 33, {}),
        (ALIGNED, 32, {"A": 4}),
        (ALIGNED, 32, {"num_warps": 8}),
        (ALIGNED.to("meta"), 32, {}),
    ],
    ids=["address", "dtype", "number", "constant", "warps", "device"],
)
def test_other_arguments_are_searched(kernel: CachedLaunches, x: torch.Tensor, n: int, options: dict[str, int]) -> None:
    first = {"A": 3, "B": 7, "num_warps": 4}
    kernel[(1,)](ALIGNED, 32, **first)
    kernel[(1,)](x, n, **{**first, **options})
    assert len(kernel.jit.found) == 2 and not any(code.launches or code.by_triton for code in kernel.jit.found)


def test_launches_that_are_counted_go_through_triton(kernel: CachedLaunches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "enabled", False)
    for _ in range(2):
        kernel[(1,)](ALIGNED, 32, A=3, B=7)
    assert len(kernel.jit.found) == 2


def test_a_constant_that_is_missing_is_an_error(kernel: CachedLaunches) -> None:
    with pytest.raises(KeyError, match="B"):
        kernel[(1,)](ALIGNED, 32, A=3)
