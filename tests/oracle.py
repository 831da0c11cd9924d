"""What the tests compare the ops with: stock torch in fp64, stock's own error, and bytes counted by the allocator."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hf_actcompress.memory.measurement.allocator import allocator_trace

Function = Callable[..., Tensor]

# law 2: our error may be at most this many times stock's own error; both are errors against the fp64 oracle
EXACT = 1.1


def clones(inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """New leaf tensors with the same values, strides and requires_grad."""
    out: list[Tensor | None] = []
    for x in inputs:
        if x is None:
            out.append(None)
            continue
        y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        y.copy_(x.detach())
        out.append(y.requires_grad_(x.requires_grad))
    return out


def gradients(function: Function, inputs: Sequence[Tensor | None], dy: Tensor | None = None) -> list[Tensor]:
    """The output, and the gradient of every input that requires one; dy defaults to a fixed pattern."""
    leaves = clones(inputs)
    y = function(*leaves)
    wanted = [x for x in leaves if x is not None and x.requires_grad]
    dy = pattern(y) if dy is None else dy
    grads = torch.autograd.grad(y, wanted, dy, allow_unused=True)
    return [y.detach(), *(g if g is not None else torch.zeros(()) for g in grads)]


def pattern(y: Tensor) -> Tensor:
    """An incoming gradient with no symmetry, the same in every dtype up to rounding."""
    dy = torch.sin(torch.arange(y.numel(), dtype=torch.float64) * 1.7 + 0.3)
    return dy.view(y.shape).to(y.device, y.dtype)


def widened(x: Any) -> Any:
    """An fp64 copy of a module or a floating-point tensor; anything else is returned unchanged."""
    if isinstance(x, nn.Module):
        return copy.deepcopy(x).double()
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.detach().double().requires_grad_(x.requires_grad)
    return x


def assert_equal_bits(ours: Sequence[Tensor], stock: Sequence[Tensor]) -> None:
    assert len(ours) == len(stock)
    for index, (a, b) in enumerate(zip(ours, stock, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape, f"value {index}: {a.dtype} {a.shape} {b.dtype} {b.shape}"
        assert torch.equal(a, b), f"value {index} differs by up to {(a.double() - b.double()).abs().max():.3g}"


def assert_within_law(ours: Sequence[Tensor], stock: Sequence[Tensor], oracle: Sequence[Tensor]) -> None:
    """Law 2: the error of each of our gradients is at most 1.1 times stock's own, both against fp64."""
    for index, (a, b, truth) in enumerate(zip(ours, stock, oracle, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape
        error = (a.double() - truth).norm()
        own = (b.double() - truth).norm()
        # stock's error may be zero by chance; an error of one rounding of the true value is always allowed
        floor = torch.finfo(a.dtype).eps / 2 * truth.norm() if a.is_floating_point() else 0.0
        assert error <= EXACT * max(own, floor), f"value {index}: error {error:.3g}, stock's own {own:.3g}"


def held_bytes(function: Callable[[], Any]) -> int:
    """Bytes that the call allocated and that are still there while its result is held, by allocator events."""
    return allocator_trace(function).net_bytes


def kept_bytes(function: Callable[[], Tensor]) -> int:
    """Bytes kept for backward: what is held, less the output itself."""
    sizes: list[int] = []

    def run() -> Tensor:
        y = function()
        sizes.append(y.untyped_storage().nbytes())
        return y

    return held_bytes(run) - sizes[0]


def nbytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def graph_nodes(y: Tensor) -> Iterator[Any]:
    """Every autograd node that y's gradient passes."""
    seen: set[Any] = set()
    pending = [y.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        pending.extend(parent for parent, _ in node.next_functions)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors reachable through attributes, slots, containers, closures and partials, not through modules."""
    seen: dict[int, Any] = {}
    pending = [value]
    while pending:
        value = pending.pop()
        if id(value) in seen or isinstance(value, (nn.Module, ModuleType, type, str, bytes, int, float, torch.dtype)):
            continue
        # `seen` holds the objects, because Python may give the id of a freed object to a new one
        seen[id(value)] = value
        if isinstance(value, Tensor):
            yield value
        else:
            pending.extend(_parts(value))


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from (*value.keys(), *value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    elif callable(value) and hasattr(value, "__code__"):
        yield from (cell.cell_contents for cell in value.__closure__ or ())
        yield from value.__defaults__ or ()
    else:
        for name in ("func", "args", "keywords", "__self__", "__func__"):
            yield getattr(value, name, None)
        for cls in type(value).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            yield from (getattr(value, slot, None) for slot in ((slots,) if isinstance(slots, str) else slots))
        yield getattr(value, "__dict__", None)


@dataclass(frozen=True)
class Counted:
    """A function that counts its calls; it holds no tensor."""

    function: Function
    calls: list[int]

    def __call__(self, *args: Tensor) -> Tensor:
        self.calls[0] += 1
        return self.function(*args)


def counted(function: Function) -> Counted:
    return Counted(function, [0])
