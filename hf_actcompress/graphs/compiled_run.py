"""What runs around the code that a compiler has made of a plan: it takes and returns what the plan's own code does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import SymInt, Tensor

from ..codecs import Codec
from ..private_apis.inductor import Boxed
from ..records import Record, Stored
from .packing import Packed


class PackedInGraph(NamedTuple):
    """How a kept tensor is packed in the forward's graph.

    Attributes:
        packed: Where it is kept.
        codec: Its codec.
        tensors: What the codec makes of it, without data.
        meta: The codec's static data, in which sizes may be symbols.
    """

    packed: Packed
    codec: Codec
    tensors: tuple[Tensor, ...]
    meta: object


class Layout:
    """Where what the forward's graph returns is: each result is one value, or the tensors that a codec has made.

    Args:
        counts: For each result how many tensors a codec has made of it; None for a value as it is.
        forms: How results were packed in the graph, in order.
        apart: By result: what packs it when the code has run.

    Attributes:
        places: For each result where it begins, and how many tensors a codec has made; None for a value as it is.
        end: Where the sizes in the codecs' static data begin.
    """

    def __init__(
        self,
        counts: Sequence[int | None],
        forms: Sequence[PackedInGraph],
        apart: dict[int, Callable[[Tensor], Record]],
    ) -> None:
        self.places: list[tuple[int, int | None]] = []
        self.end = 0
        for count in counts:
            self.places.append((self.end, count))
            self.end += 1 if count is None else count
        self.apart, self.forms = apart, list(forms)

    @property
    def is_flat(self) -> bool:
        """Whether each result is one value of the code."""
        return not self.forms and not self.apart

    def put_together(self, flat: Sequence[Any]) -> list[Any]:
        """The results."""
        forms, sizes = iter(self.forms), iter(flat[self.end :])
        found: list[Any] = []
        for i, (at, count) in enumerate(self.places):
            if count is not None:
                form = next(forms)
                found.append(Stored(form.codec, tuple(flat[at : at + count]), _with_sizes(form.meta, sizes)))
            else:
                found.append(self.apart[i](flat[at]) if i in self.apart else flat[at])
        return found


class ForwardRun:
    """Runs the code of a forward.

    Args:
        code: Inductor's code.
        places: Which inputs it takes.
        layout: Where the results are in what it returns.
        outputs: How many of the results are the layer's outputs.
    """

    def __init__(self, code: Boxed, places: list[int], layout: Layout, outputs: int) -> None:
        self._code, self._places, self._layout, self._outputs = code, places, layout, outputs
        # outputs that share memory with an input or another result, and which one; None before the first run
        self._shared: list[tuple[int, int]] | None = None

    def run(self, *inputs: Tensor) -> Sequence[Any]:
        """What a plan's own code returns."""
        flat = list(self._code([inputs[i] for i in self._places]))
        if self._shared is None:
            self._shared = list(self._sharing(flat, inputs))
        for i, j in self._shared:
            # as a view, which has the version counter of what it shows
            y, of = flat[i], flat[j] if j >= 0 else inputs[-1 - j]
            flat[i] = of.as_strided(y.shape, y.stride(), y.storage_offset())
        return flat if self._layout.is_flat else self._layout.put_together(flat)

    def _sharing(self, flat: Sequence[Any], inputs: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
        owners = {x.untyped_storage().data_ptr(): -1 - i for i, x in enumerate(inputs)}
        for j, x in enumerate(flat):
            if j >= self._outputs and isinstance(x, Tensor):
                owners.setdefault(x.untyped_storage().data_ptr(), j)
        for i, y in enumerate(flat[: self._outputs]):
            if y.numel() and y.untyped_storage().data_ptr() in owners:
                yield i, owners[y.untyped_storage().data_ptr()]


class BackwardRun:
    """Runs the code of a backward.

    Args:
        code: Inductor's code.
        reads: For each value that it takes: its place in what the plan's code is given, what opens it, and whether it
            is the tensors of a codec.
        returned: For each input of the plan: whether the code returns a gradient.
    """

    def __init__(
        self, code: Boxed, reads: Sequence[tuple[int, Callable[[Any], Any] | None, bool]], returned: Sequence[bool]
    ) -> None:
        self._code, self._reads, self._returned = code, reads, returned

    def run(self, saved: list[Any]) -> tuple[Any, ...]:
        """The gradients of the inputs. The list is emptied, and each of its tensors freed after its last reader."""
        given: list[Any] = []
        for i, opens, packed in self._reads:
            if packed:
                slot, tensors = saved[i]
                given += [tensors[j] for j in slot.positions]
                del tensors
            else:
                given.append(saved[i] if opens is None else opens(saved[i]))
        saved.clear()
        found = iter(self._code(given))
        return tuple([next(found) if one else None for one in self._returned])


def symbols_in(value: Any) -> list[SymInt]:
    """The sizes in a codec's static data that a graph for any sizes leaves open."""
    if isinstance(value, SymInt):
        return [value]
    if dataclasses.is_dataclass(value):
        value = [getattr(value, one.name) for one in dataclasses.fields(value)]
    return [x for one in value for x in symbols_in(one)] if isinstance(value, (tuple, list)) else []


def _with_sizes(value: Any, sizes: Iterator[int]) -> Any:
    """The same data with numbers in the place of these sizes, in order."""
    if isinstance(value, SymInt):
        return next(sizes)
    if dataclasses.is_dataclass(value) and symbols_in(value):
        fields = [one.name for one in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: _with_sizes(getattr(value, name), sizes) for name in fields})  # type: ignore[type-var]
    if isinstance(value, (tuple, list)) and symbols_in(value):
        return type(value)(_with_sizes(one, sizes) for one in value)
    return value
