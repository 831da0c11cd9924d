"""The weights that a module's own code reads, where that code runs again in backward.

The second run reads aliases of the weights, and its gradients are those of the aliases. So hooks on the weights see
only one gradient, which the op returns, and not the gradients of each run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class OwnWeights:
    """The parameters of a module and of its submodules, each once, with the places from which code reads them.

    Args:
        module: The module whose code runs again.
        buffers: Whether buffers count, too.
        children: Whether the weights of its submodules count, too.
    """

    __slots__ = ("_places", "_versions", "tensors")

    def __init__(self, module: nn.Module, buffers: bool = False, children: bool = True) -> None:
        self._places: list[tuple[dict[str, Any], str, int]] = []
        self.tensors: list[Tensor] = []
        known: dict[int, int] = {}
        parts = [*module.modules()] if children else [module]
        places: list[dict[str, Any]] = [part._parameters for part in parts]
        places += [part._buffers for part in parts] if buffers else []
        for place in places:
            for name, x in place.items():
                if x is not None:
                    index = known.setdefault(id(x), len(known))
                    self._places.append((place, name, index))
                    if index == len(self.tensors):
                        self.tensors.append(x)
        self._versions = [x._version for x in self.tensors]

    def are_the_same(self) -> bool:
        """Whether the module still has these parameters, and none was modified in place."""
        return [x._version for x in self.tensors] == self._versions and all(
            place.get(name) is self.tensors[index] for place, name, index in self._places
        )

    @contextmanager
    def read_as(self, others: Sequence[Tensor]) -> Iterator[None]:
        """Let the module read other tensors in place of `tensors`, in that order."""
        before = [place[name] for place, name, _ in self._places]
        for place, name, index in self._places:
            place[name] = others[index]
        try:
            yield
        finally:
            for (place, name, _), parameter in zip(self._places, before, strict=True):
                place[name] = parameter


# of code that reads no weights
NO_WEIGHTS = OwnWeights(nn.Module())


def alias(x: Tensor, needed: bool) -> Tensor:
    """A leaf with x's data."""
    return x.detach().requires_grad_(needed)
