"""How deferred logits get values: `LogitsSource` computes the head's own, a chain of `Values` those made from them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

# elementwise functions and their in-place forms
IN_PLACE: dict[Any, Any] = {
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.mul.Scalar: aten.mul_.Scalar,
    aten.div.Tensor: aten.div_.Tensor,
    aten.div.Scalar: aten.div_.Scalar,
    aten.neg.default: aten.neg_.default,
    aten.tanh.default: aten.tanh_.default,
}


class DeferredOp:
    """One op on logits, with all its arguments except the logits."""

    __slots__ = ("args", "func", "kwargs")

    def __init__(self, func: Callable[..., Tensor], args: tuple[Any, ...] = (), kwargs: Any = None) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs or {}

    def __call__(self, x: Tensor) -> Tensor:
        return self.func(x, *self.args, **self.kwargs)

    def written_over(self, x: Tensor) -> Tensor:
        """The op in x's memory, if it has an in-place form: logits are the largest tensor of many training steps."""
        function: Callable[..., Tensor] = IN_PLACE.get(self.func, self.func)
        return function(x, *self.args, **self.kwargs)


def is_cast(function: Callable[..., Tensor], dtype: torch.dtype) -> bool:
    """Whether the function is a deferred cast to that dtype."""
    if not isinstance(function, DeferredOp) or function.func is not aten._to_copy.default:
        return False
    return bool(function.kwargs.get("dtype") == dtype)


class LogitsSource:
    """One call of a head: how its logits are computed, and which functions of them can do without the values."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # the device of `DeferredLogits.rows`
        self.rows_device = device
        # whether a view of the values exists, and whether they can be written without autograd's notice
        self.lent = self.exposed = False
        self.chains: weakref.WeakSet[Values] = weakref.WeakSet()

    def logits(self) -> Tensor:
        """The values, outside autograd."""
        raise NotImplementedError

    def function(self, func: Any) -> Callable[..., Any] | None:
        """What runs instead of a torch function, or None; it returns NotImplemented for arguments it does not take."""
        return None

    def lend(self) -> None:
        """Compute what was derived from the values so far, before their memory is handed out or written."""
        self.lent = True
        for chain in list(self.chains):
            if chain.owner() is not None:
                chain.get()


class Values:
    """The values of deferred logits: from the source, or by a step from earlier values. They are computed once.

    It holds none of the tensors that autograd sees: their graph may hold this object, and a cycle would never be freed.
    """

    __slots__ = ("__weakref__", "_made", "_version", "owner", "parent", "seen", "source", "step")

    def __init__(
        self, source: LogitsSource, parent: Values | None = None, step: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.source, self.parent, self.step = source, parent, step
        self.owner: Callable[[], Tensor | None] = lambda: None
        self._made: Tensor | None = None
        self._version = 0
        # how many in-place writes the steps have made
        self.seen = 0
        source.chains.add(self)

    def get(self) -> Tensor:
        """The plain tensor without gradient, as the stock ops make it from the head's output."""
        if self._made is not None:
            return self._made
        with torch.no_grad():
            if self.parent is None or self.step is None:
                values, wanted = self.source.logits(), True
            else:
                # once the tensor is gone, the values cannot be asked for again
                values, wanted = self._stepped(self.parent), self.owner() is not None
        if wanted:
            self._made, self._version = values, values._version
        return values

    def _stepped(self, parent: Values) -> Tensor:
        assert self.step is not None
        before = parent.get()
        if not (isinstance(self.step, DeferredOp) and self._nobody_else_sees(before)):
            return self.step(before)
        for earlier in parent.line():
            earlier._made = None
        return self.step.written_over(before)

    def _nobody_else_sees(self, before: Tensor) -> bool:
        """Whether only values derived by this step still need the values before it."""
        source, earlier = self.source, list(self.parent.line()) if self.parent is not None else []
        if source.lent or source.exposed or not before.is_floating_point():
            return False
        return all(chain.owner() is None or (chain not in earlier and self in chain.line()) for chain in source.chains)

    def line(self) -> Iterator[Values]:
        """These values and those from which they were derived, back to the source's own."""
        values: Values | None = self
        while values is not None:
            yield values
            values = values.parent

    @property
    def made(self) -> bool:
        return self._made is not None

    def root(self) -> Values:
        return self if self.parent is None else self.parent.root()

    def written(self) -> bool:
        """Whether the values were changed in place: these, a view of them, or earlier ones."""
        if self.source.exposed or (self._made is not None and self._made._version > self._version):
            return True
        # autograd counts the writes on what it sees, which is the deferred tensor and not its values
        owner = self.owner()
        return (owner is not None and owner._version > self.seen) or (self.parent is not None and self.parent.written())
