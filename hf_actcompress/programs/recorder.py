"""What a layer computes, written down while its own code runs once on tensors without data.

The modules that we know (linear layers, norms, activations, dropout) are noted as a whole, the code between them call
by call. Nothing is guessed from names: a layer whose code does what no operation stands for is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..codecs import IDENTITY, Codec
from ..records.nested import tensors_in
from .arithmetic import Add, Cast, Mul, Neg, Scale, Slice, Split
from .broadcast import Shift
from .operations import LayerNorm, Linear, RMSNorm
from .pointwise import Activation, Dropout, GatedProduct
from .refusal import NotStraight
from .step import Operation, Step
from .tape import Attend

# calls that return no tensor, or a result that no layer's code computes with
_QUESTIONS = {
    "__get__", "size", "dim", "numel", "stride", "is_contiguous", "is_floating_point", "__len__", "get_device",
}  # fmt: skip

# these operations compute the same on rows [B * T, C] as on [B, T, C]
_BY_ROWS = (Activation, Add, Cast, Dropout, LayerNorm, Linear, Mul, Neg, RMSNorm, Scale, Shift)


class Recorder(TorchFunctionMode):
    """While it is active, notes the torch calls on tensors that it knows.

    Args:
        rules: By the name of a torch function, the rule that notes a call: ``rule(recorder, result, *arguments)``.

    Attributes:
        metas: For each value a tensor without data.
        entries: What has been noted.
        autocast: The dtype of products under autocast; None while it is off.
        masks: By the id of the tensor: the name of the layer's argument that is this mask.
        handed: By the id of the object: the name of the layer's argument for which it stands.
        modules: The modules of the layer, by name.
        module: The name of the module that is running.
        flat: The values [B, T, C] that the layer's code also holds, or only holds, as [B * T, C].
    """

    def __init__(self, rules: Mapping[str, Callable[..., None]], autocast: torch.dtype | None) -> None:
        super().__init__()
        self._rules = rules
        self.autocast = autocast
        self.metas: list[Tensor] = []
        self.entries: list[Step | Attend] = []
        self.masks: dict[int, str] = {}
        self.handed: dict[int, str] = {}
        self.modules: dict[str, nn.Module] = {}
        self.module = ""
        self.flat: set[int] = set()
        self._silent = False
        # id of a tensor object -> the object, held so that no other one gets this id, and its value
        self._known: dict[int, tuple[Tensor, int]] = {}

    def given(self, x: Tensor) -> int:
        """A new value, for a tensor that is not known yet."""
        self._known[id(x)] = x, len(self.metas)
        self.metas.append(x)
        return len(self.metas) - 1

    def same(self, y: Tensor, x: Tensor) -> None:
        """Note that y is the same value as x, perhaps as another tensor object."""
        self.known_as(y, self.value(x))

    def known_as(self, y: Tensor, value: int) -> None:
        """Note that y is the value of this number."""
        self._known[id(y)] = y, value

    def maker(self, x: Tensor) -> Step | None:
        """The step that has made a tensor, if one has."""
        value = self.value(x)
        return next((e for e in reversed(self.entries) if isinstance(e, Step) and value in e.outs), None)

    def is_unread(self, x: Tensor) -> bool:
        """Whether a tensor has memory of its own, no step has read it, and no other tensor object is the same value."""
        value, maker = self.value(x), self.maker(x)
        read = any(value in entry.ins for entry in self.entries)
        names = sum(known == value for _, known in self._known.values())
        return maker is not None and not maker.operation.same and not read and names == 1

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
        self.entries.append(Step(operation, values, made, self.module, codec))

    def within(self, module: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a module in the layer; its steps are noted under the name of this module."""
        before, self.module = self.module, module
        try:
            return forward(*args, **kwargs)
        finally:
            self.module = before

    @contextmanager
    def silently(self) -> Iterator[None]:
        """Note no calls inside of this block: the module that runs there is noted as a whole."""
        self._silent = True
        try:
            yield
        finally:
            self._silent = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        # autocast does not act on tensors without data: cast as it would
        attends = name == "scaled_dot_product_attention" and self.autocast is not None
        y = func(*(x.to(self.autocast) for x in args[:3]), *args[3:], **kwargs) if attends else func(*args, **kwargs)
        known = any(id(x) in self._known for x in tensors_in((args, kwargs)))
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


def with_gated_products(entries: list[Step | Attend]) -> list[Step | Attend]:
    """The entries with act(gate) * up as one operation, where nothing else reads act(gate)."""
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


def with_splits(entries: list[Step | Attend]) -> list[Step | Attend]:
    """The entries with all slices of a value as one Split, where they cover the value and nothing else reads it."""
    readers: dict[int, list[Step | Attend]] = {}
    for entry in entries:
        for value in dict.fromkeys(entry.ins):
            if value is not None:
                readers.setdefault(value, []).append(entry)
    splits: dict[int, Step] = {}
    replaced: set[int] = set()
    for value, found in readers.items():
        parts = [entry for entry in found if isinstance(entry, Step) and isinstance(entry.operation, Slice)]
        parts.sort(key=lambda part: part.operation.start)  # type: ignore[attr-defined]
        if len(parts) == len(found) > 1 and _cover([part.operation for part in parts]):  # type: ignore[misc]
            outs = tuple(part.outs[0] for part in parts)
            sizes = tuple(part.operation.end - part.operation.start for part in parts)  # type: ignore[attr-defined]
            operation = Split(sizes, parts[0].operation.dim)  # type: ignore[attr-defined]
            splits[min(outs)] = Step(operation, (value,), outs, parts[0].module)
            replaced.update(outs)
    left: list[Step | Attend] = []
    for entry in entries:
        first = entry.outs[0] if isinstance(entry, Step) else entry.out
        if first not in replaced:
            left.append(entry)
        elif first in splits:
            left.append(splits[first])
    return left


def _cover(parts: list[Slice]) -> bool:
    """Whether these slices cover one dimension, in order and without overlap."""
    joined = all(left.end == right.start for left, right in zip(parts, parts[1:], strict=False))
    whole = parts[0].start == 0 and parts[-1].end == parts[0].size
    return joined and whole and {(part.dim, part.step) for part in parts} == {(parts[0].dim, 1)}


def _multiplies(entry: Step | Attend) -> bool:
    return isinstance(entry, Step) and isinstance(entry.operation, Mul)
