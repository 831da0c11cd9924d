"""The origin of logits that left their model: the head's node in autograd's graph, and the values if they are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..records import load
from ..reference.linear_rows import linear_rows
from ..reference.logits_chunks import Pointwise
from .deferred_values import LogitsSource
from .gradient_parts import Read
from .row_set import rows_at

Function: TypeAlias = Callable[..., Any]

_GONE = (
    "the values of these logits were not kept and cannot be computed any more; patch the model with "
    "CompressionConfig(logits=True), or read them before backward and before the step of the optimizer"
)


class HeadOrigin:
    """The node of autograd that keeps the head's input. It holds no tensor itself."""

    __slots__ = ("device", "dtype", "edge", "pointwise", "sums")

    def __init__(self, device: torch.device, dtype: torch.dtype, pointwise: Pointwise) -> None:
        self.device, self.dtype, self.pointwise = device, dtype, tuple(pointwise)
        self.edge: GradientEdge | None = None
        # of the weight and the bias in the forward, if their values are asked for later
        self.sums: list[Tensor | None] = []

    def kept(self) -> Sequence[Any]:
        """The head's input, weight and bias."""
        assert self.edge is not None
        try:
            return load(self.edge.node)
        except RuntimeError as error:
            raise RuntimeError(f"{_GONE} ({error})") from error

    def read(self) -> Read:
        """How to compute rows of the logits [K, V] from what is kept."""
        return self._read(*self.kept())

    def all_rows(self, count: int) -> Tensor:
        """The logits of all rows [count, V]. Raises RuntimeError if the weights are not those of the forward.

        Averages of weights (EMA) are often written through `.data`, which no version counter sees. So checksums are
        compared.
        """
        _, *weights = kept = self.kept()
        read = self._read(*kept)
        if self.sums and not all(map(_equal, self.sums, map(checksum, weights))):
            raise RuntimeError(f"{_GONE} (the head's weight has been written on through .data)")
        return read(slice(0, count))

    def _read(self, *kept: Any) -> Read:
        h, weight, bias = operands(kept, self.dtype)
        if weight.untyped_storage().nbytes() < weight.numel() * weight.element_size():
            raise RuntimeError(f"{_GONE} (the head's weight is sharded outside of the model's forward)")
        return lambda rows: linear_rows(rows_at(h, rows), weight, bias, self.pointwise)


class HeldOrigin(HeadOrigin):
    """The origin in a forward without gradients, which has no node: it holds the head's input and weight.

    Args:
        kept: The head's input, weight and bias.
    """

    __slots__ = ("_kept", "_versions")

    def __init__(self, device: torch.device, dtype: torch.dtype, pointwise: Pointwise, *kept: Tensor | None) -> None:
        super().__init__(device, dtype, pointwise)
        self._kept = [None if x is None else x.detach() for x in kept]
        self._versions = self._seen()

    def kept(self) -> Sequence[Any]:
        if self._seen() != self._versions:
            raise RuntimeError(f"{_GONE} (the head's input or its weight has been written on)")
        return self._kept[0].to(self.dtype), *self._kept[1:]  # type: ignore[union-attr]

    def _seen(self) -> list[int]:
        return [0 if x is None else x._version for x in self._kept]


@torch.no_grad()
def checksum(x: Tensor | None) -> Tensor | None:
    """The sum [] of x's bits as 64-bit integers, on x's device: another sum shows that x has other values."""
    if x is None:
        return None
    octets = x.detach().contiguous().view(-1).view(torch.uint8)
    whole = octets.numel() // 8 * 8
    return octets[:whole].view(torch.int64).sum() + octets[whole:].sum()


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is None or (b is not None and torch.equal(a, b))


def operands(kept: Sequence[Any], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    """The head's input [N, h], weight and bias in the dtype of its product, from what its node keeps."""
    h, weight, bias = kept
    return h.reshape(-1, h.size(-1)), weight.to(dtype), bias.to(dtype) if bias is not None else None


class ReturnedSource(LogitsSource):
    """The logits of one forward: their values, or None where they were not kept, and the node of their head."""

    def __init__(
        self, origin: HeadOrigin, values: Tensor | None, like: Tensor, function: Callable[[Any], Function | None]
    ) -> None:
        super().__init__(origin.device)
        self.rows_device = torch.device("cpu")
        self.origin, self.values, self.like, self._function = origin, values, like, function

    def logits(self) -> Tensor:
        if self.values is None:
            with torch.no_grad():
                self.values = self.origin.all_rows(self.like.shape[:-1].numel()).view(self.like.shape)
        return self.values

    def read(self) -> Read:
        """The function that returns rows of the logits, outside autograd."""
        if self.values is None:
            return self.origin.read()
        values = self.values.flatten(0, -2)
        return lambda rows: rows_at(values, rows)

    def function(self, func: Any) -> Function | None:
        return self._function(func)
