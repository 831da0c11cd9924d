"""What a layer computes, written down while its own code runs once on tensors without data.

The modules that we know (linear layers, norms, activations, dropout) are noted as a whole, the code between them call
by call. Nothing is guessed from names: a layer whose code does what no operation stands for is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..codecs import IDENTITY, Codec
from .arithmetic import Add, Cast, Mul, Neg, Scale
from .operations import LayerNorm, Linear, RMSNorm
from .pointwise import Activation, Dropout, GatedProduct
from .refusal import NotStraight
from .step import Operation, Step
from .tape import Attend

# calls that ask a tensor for something that is no tensor, or for what no code of a layer goes on with
_QUESTIONS = {
    "__get__", "size", "dim", "numel", "stride", "is_contiguous", "is_floating_point", "__len__", "get_device",
}  # fmt: skip

# they do the same with [B * T, C] as with [B, T, C]
_BY_ROWS = (Activation, Add, Cast, Dropout, LayerNorm, Linear, Mul, Neg, RMSNorm, Scale)


class Recorder(TorchFunctionMode):
    """Notes what is called on the tensors that it knows while it is on.

    Args:
        rules: By the name of a function of torch, what notes a call of it: ``rule(recorder, result, *arguments)``.

    Attributes:
        metas: Of each value a tensor without data.
        entries: What has been noted.
        autocast: The dtype of products under autocast; None while it is off.
        flat: The values [B, T, C] that the code also has, or only has, as [B * T, C].
    """

    def __init__(self, rules: Mapping[str, Callable[..., None]], autocast: torch.dtype | None) -> None:
        super().__init__()
        self._rules = rules
        self.autocast = autocast
        self.metas: list[Tensor] = []
        self.entries: list[Step | Attend] = []
        self.flat: set[int] = set()
        self._silent = False
        self._module = ""
        # by the id of the tensor object, which is held here
        self._known: dict[int, tuple[Tensor, int]] = {}

    def given(self, x: Tensor) -> int:
        """The value of a tensor that is new."""
        self._known[id(x)] = x, len(self.metas)
        self.metas.append(x)
        return len(self.metas) - 1

    def same(self, y: Tensor, x: Tensor) -> None:
        """y is what x is, perhaps in another object."""
        self._known[id(y)] = y, self.value(x)

    def value(self, x: Any) -> int:
        if id(x) not in self._known:
            raise NotStraight("it computes with a tensor that is neither given nor computed by operations")
        return self._known[id(x)][1]

    def note(
        self, operation: Operation, ins: tuple[Tensor | None, ...], *outs: Tensor, codec: Codec = IDENTITY
    ) -> None:
        """Note a step."""
        values = tuple(None if x is None else self.value(x) for x in ins)
        made = tuple(self.given(y) for y in outs)
        flat = [x.dim() == 2 for x, value in zip(ins, values, strict=True) if x is not None and value in self.flat]
        if any(flat):
            if not isinstance(operation, _BY_ROWS):
                raise NotStraight(f"it takes the rows of a batch to {type(operation).__name__}")
            self.flat.update(made[:1])
        self.entries.append(Step(operation, values, made, self._module, codec))

    def within(self, module: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward of a module in the layer, whose steps are noted as its own."""
        before, self._module = self._module, module
        try:
            return forward(*args, **kwargs)
        finally:
            self._module = before

    @contextmanager
    def silently(self) -> Iterator[None]:
        """While a module runs that is noted as a whole."""
        self._silent = True
        try:
            yield
        finally:
            self._silent = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        y = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        known = any(id(x) in self._known for x in _tensors((args, tuple(kwargs.values()))))
        if self._silent or name in _QUESTIONS or not known:
            return y
        rule = self._rules.get(name)
        if rule is None:
            raise NotStraight(f"it calls {name}")
        try:
            rule(self, y, *args, **kwargs)
        except TypeError:
            raise NotStraight(f"it calls {name} with other arguments than are known") from None
        return y


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (tuple, list)):
        for item in x:
            yield from _tensors(item)


def with_gated_products(entries: list[Step | Attend]) -> list[Step | Attend]:
    """The same with act(gate) * up as one operation, where nobody else reads act(gate)."""
    read = [value for entry in entries for value in entry.ins]
    acts = {
        entry.outs[0]: entry
        for entry in entries
        if isinstance(entry, Step) and type(entry.operation) is Activation and read.count(entry.outs[0]) == 1
    }
    found: list[Step | Attend] = []
    for entry in entries:
        act = next((acts[x] for x in entry.ins if x in acts), None) if _multiplies(entry) else None
        if act is None or not isinstance(entry, Step) or not isinstance(act.operation, Activation):
            found.append(entry)
            continue
        found.remove(act)
        other = entry.ins[1] if entry.ins[0] == act.outs[0] else entry.ins[0]
        operation = GatedProduct(act.operation.act, act.operation.kind, act.operation.options)
        found.append(Step(operation, (act.ins[0], other), entry.outs, entry.module, act.codec))
    return found


def _multiplies(entry: Step | Attend) -> bool:
    return isinstance(entry, Step) and isinstance(entry.operation, Mul)
