"""Calls of kernels by records: the results of the functions themselves, with none of their Python code."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from hf_actcompress.kernels import KERNELS, launch  # noqa: E402
from hf_actcompress.kernels.launch import CachedLaunches  # noqa: E402
from hf_actcompress.kernels.recorded import recorded  # noqa: E402
from hf_actcompress.kernels.watched import Record  # noqa: E402
from hf_actcompress.private_apis import without_dispatch_modes  # noqa: E402
from hf_actcompress.reference.rng import codecs_undisturbed  # noqa: E402
from tests.kernels.harness import flat, samples  # noqa: E402
from tests.oracle import assert_equal_bits  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="its compiled code is the interpreter's")
# they read values, take tensors from elsewhere, or compute much beside their launches
WITHOUT = {"activation_output_bits", "fewbit_bwd", "linear_cross_entropy_fwd"}


class _Interpreted:
    """In the place of compiled code: Triton's interpreter."""

    run = function = packed_metadata = None

    def __init__(self, jit: Any, count: int, options: dict[str, Any]) -> None:
        self.jit, self.count, self.options = jit, count, options

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*values: Any) -> None:
            # the interpreter runs ops of torch
            with without_dispatch_modes():
                self.jit[grid[:3]](*values[: self.count], **self.options)

        return launch


class _Jit:
    def __init__(self, jit: Any) -> None:
        self.jit, self.arg_names = jit, jit.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def first(*args: Any, **options: Any) -> _Interpreted:
            self.jit[grid](*args, **options)
            return _Interpreted(self.jit, len(args), options)

        return first


@pytest.fixture(autouse=True)
def _as_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launch, "CompiledKernel", _Interpreted)
    first = CachedLaunches._launch
    jit = property(lambda self: _Jit(self.__dict__["jit"]), lambda self, jit: self.__dict__.update(jit=jit))
    monkeypatch.setattr(CachedLaunches, "jit", jit, raising=False)
    # what is compiled here is nothing for later tests
    kinds: list[dict[Any, Any]] = []

    def launched(self: CachedLaunches, *args: Any, **options: Any) -> None:
        kinds.append(self._known)
        first(self, *args, **options)

    monkeypatch.setattr(CachedLaunches, "_launch", launched)
    yield
    for known in kinds:
        known.clear()


def other(x: Any, seed: int) -> Any:
    """An argument of the same form with other numbers."""
    if not isinstance(x, Tensor):
        return x
    y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    y.copy_(x)
    return y.mul_(1 + seed / 4) if y.is_floating_point() and y.element_size() > 1 else y


@pytest.mark.parametrize("name", KERNELS)
def test_a_record_gives_what_the_function_gives(name: str) -> None:
    function: Any = getattr(importlib.import_module(f"hf_actcompress.{KERNELS[name]}"), name)
    call: Any = recorded(function)
    for args in samples(name, torch.bfloat16, 6, 64):
        for seed in range(4):
            given = [other(x, seed) for x in args]
            copies = [other(x, seed) for x in args]
            with codecs_undisturbed():
                found = flat(call(*given))
            with codecs_undisturbed():
                expected = flat(function(*copies))
            assert [x is None for x in found] == [x is None for x in expected]
            assert_equal_bits([x for x in found if x is not None], [x for x in expected if x is not None])
            assert [x.stride() for x in found if x is not None] == [x.stride() for x in expected if x is not None]
            assert_equal_bits(*([x for x in of if isinstance(x, Tensor)] for of in (given, copies)))
    assert any(isinstance(x, Record) for x in call.records.values()) == (name not in WITHOUT)


def _sum_of(x: Tensor, y: Tensor, n: int = 1) -> tuple[Tensor, Tensor]:
    return x + n * y, x


def _read(x: Tensor) -> Tensor:
    return x * float(x.flatten()[0])


_FIXED = torch.ones(3)


@pytest.mark.parametrize(
    "function", [_read, lambda x: x + _FIXED, lambda x: x + torch.rand_like(x), lambda x: x[x > 0].sum()]
)
def test_what_differs_from_call_to_call_is_not_recorded(function: Any) -> None:
    call: Any = recorded(function)
    for n in range(4):
        x = torch.tensor([n + 1.0, 2.0, -1.0])
        torch.manual_seed(n)
        found = call(x)
        torch.manual_seed(n)
        assert torch.equal(found, function(x))
    assert list(call.records.values()) == [None]


def test_a_record_is_for_one_form() -> None:
    """Shapes, strides, dtypes, other arguments, and whether two arguments are one tensor."""
    call: Any = recorded(_sum_of)
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    others = [(x[:2], y[:2]), (x.t(), y.t()), (x.double(), y.double()), (x, y, 2), (x, x), (x, y[:, ::2].repeat(1, 2))]
    for _ in range(4):
        for args in ((x, y), *others):
            found, expected = call(*args), _sum_of(*args)
            assert torch.equal(found[0], expected[0]) and found[0].stride() == expected[0].stride()
            assert found[1] is args[0]
    assert [value is None for value in call.records.values()].count(True) == 0


def test_one_tensor_given_twice_is_not_recorded() -> None:
    call: Any = recorded(_sum_of)
    x = torch.randn(3)
    for _ in range(3):
        call(x, x)
    # the next call may have two tensors of that form
    assert not call.records


def test_a_call_under_autocast_or_in_a_graph_runs_the_function() -> None:
    call: Any = recorded(_sum_of)
    x = torch.randn(3)
    with torch.autocast("cpu"):
        call(x, x + 1)
    assert torch.equal(torch.compile(call, backend="eager")(x, x + 1)[0], 2 * x + 1)
    assert not call.records
