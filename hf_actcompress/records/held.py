"""What autograd holds in place of a tensor that stock code saved under the net, and how the tensor comes back."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .outside import Hooks
from .saving import Slot, count


class Kept:
    """Tensors that are kept.

    Args:
        parts: For each tensor what the outer hooks returned; the tensors themselves if there are no outer hooks.
        versions: The tensors' versions when they were kept; None if outer hooks may have copied the tensors.
        slot: Computes the saved value from the tensors; None: the value is the only part.
    """

    __slots__ = ("parts", "slot", "versions")

    def __init__(self, parts: tuple[Any, ...], versions: tuple[int, ...] | None, slot: Slot | None) -> None:
        self.parts, self.versions, self.slot = parts, versions, slot


def counted(held: Kept) -> Kept:
    """Count one more consumer of the value. The last consumer that reads the value drops it."""
    if held.slot is not None:
        count(held.slot)
    return held


def value_of(held: Kept, outside: Hooks | None) -> Tensor:
    """The saved tensor, computed or read. Raises RuntimeError if somebody has written into a kept tensor."""
    tensors: tuple[Tensor, ...] = held.parts if outside is None else tuple(outside[1](part) for part in held.parts)
    if held.versions is not None:
        check_versions(tensors, held.versions)
    return tensors[0] if held.slot is None else held.slot.value(tensors)


def check_versions(tensors: tuple[Tensor, ...], versions: tuple[int, ...]) -> None:
    """Raise torch's own RuntimeError if a tensor has been modified in place since it was saved."""
    for x, version in zip(tensors, versions, strict=True):
        if x._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{x.type()} {list(x.shape)}] is at version {x._version}; expected version {version} instead. Hint: "
                "enable anomaly detection to find the operation that failed to compute its gradient, with "
                "torch.autograd.set_detect_anomaly(True)."
            )
