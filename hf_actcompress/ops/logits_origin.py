"""Where logits that left their model come from: the head that computes them when they are read, and its node."""

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
    "outputs.logits are computed when they are read, from the head's input and weight, and that is not possible any "
    "more: {}; read them before the optimizer's step, or return them whole: patch_model(model, "
    "CompressionConfig(logits=True))"
)


class HeadOrigin:
    """The node of autograd that keeps the head's input: gradients read the logits through it. It holds no tensor."""

    __slots__ = ("device", "dtype", "edge", "pointwise")

    def __init__(self, device: torch.device, dtype: torch.dtype, pointwise: Pointwise) -> None:
        self.device, self.dtype, self.pointwise = device, dtype, tuple(pointwise)
        self.edge: GradientEdge | None = None

    def read(self) -> Read:
        """How to compute rows of the logits [K, V] from what the node keeps."""
        assert self.edge is not None
        return reader(load(self.edge.node), self.dtype, self.pointwise)


class HeldHead:
    """A head's input [..., D], weight [V, D] and bias [V] of one forward, held by the logits that it returned.

    Averages of weights (EMA) are often written through `.data`, which no version counter sees. So checksums are
    compared, too.
    """

    __slots__ = ("_kept", "_sums", "_versions", "dtype", "pointwise")

    def __init__(self, dtype: torch.dtype, pointwise: Pointwise, *kept: Tensor | None) -> None:
        self.dtype, self.pointwise = dtype, tuple(pointwise)
        self._kept = [None if x is None else x.detach() for x in kept]
        self._versions = self._seen()
        self._sums = [checksum(x) for x in self._kept[1:]]

    def read(self, all_rows: bool = False) -> Read:
        """How to compute rows of the logits. Raises RuntimeError if the head is not that of the forward any more.

        Args:
            all_rows: Also compare the checksums.
        """
        weights = self._kept[1:]
        if self._seen() != self._versions:
            raise RuntimeError(_GONE.format("the head's input or its weight has been written on"))
        if any(x is not None and x.untyped_storage().nbytes() < x.numel() * x.element_size() for x in weights):
            raise RuntimeError(_GONE.format("the head's weight is sharded outside of the model's forward"))
        if all_rows and not all(map(_equal, self._sums, map(checksum, weights))):
            raise RuntimeError(_GONE.format("the head's weight has been written on through .data"))
        return reader((self._kept[0].to(self.dtype), *weights), self.dtype, self.pointwise)  # type: ignore[union-attr]

    def _seen(self) -> list[int]:
        return [0 if x is None else x._version for x in self._kept]


def reader(kept: Sequence[Any], dtype: torch.dtype, pointwise: Pointwise) -> Read:
    """The function that computes rows of the logits from a head's input, weight and bias."""
    h, weight, bias = operands(kept, dtype)
    return lambda rows: linear_rows(rows_at(h, rows), weight, bias, pointwise)


@torch.no_grad()
def checksum(x: Tensor | None) -> Tensor | None:
    """The sum [] of x's bits as 64-bit integers, on x's device: another sum shows that x has other values."""
    if x is None:
        return None
    octets = x.detach().contiguous().view(-1).view(torch.uint8)
    whole = octets.numel() // 8 * 8
    total = octets[:whole].view(torch.int64).sum()
    return total if whole == octets.numel() else total + octets[whole:].sum()


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is None or (b is not None and torch.equal(a, b))


def operands(kept: Sequence[Any], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    """The head's input [N, h], weight and bias in the dtype of its product, from what its node keeps."""
    h, weight, bias = kept
    return h.reshape(-1, h.size(-1)), weight.to(dtype), bias.to(dtype) if bias is not None else None


class KeptLogits:
    """Logits [N, V] that several functions and the backward of the head share. The first function computes them, and
    the backward takes them.

    Args:
        fits: Whether they may be kept; else each function computes the rows that it reads.
    """

    __slots__ = ("_logits", "fits")

    def __init__(self, fits: bool) -> None:
        self.fits = fits
        self._logits: Tensor | None = None

    def get(self, make: Callable[[], Tensor]) -> Tensor:
        """The logits, which `make` computes the first time."""
        if self._logits is None:
            self._logits = make()
        return self._logits

    def take(self) -> Tensor | None:
        """The logits, if there are any. A further backward through a retained graph computes them again."""
        logits, self._logits = self._logits, None
        return logits


class ReturnedSource(LogitsSource):
    """The logits of one forward: their values, or the head that computes them; and the node of the head, if any."""

    def __init__(
        self,
        held: HeldHead | Tensor,
        device: torch.device,
        like: Tensor,
        function: Callable[[Any], Function | None],
        origin: HeadOrigin | None = None,
        fits: bool = False,
    ) -> None:
        super().__init__(device)
        self.rows_device = torch.device("cpu")
        self.held, self.like, self.origin, self._function = held, like, origin, function
        self.kept = KeptLogits(fits)

    @property
    def values(self) -> Tensor | None:
        """The logits, if they exist."""
        return self.held if isinstance(self.held, Tensor) else None

    def logits(self) -> Tensor:
        if not isinstance(self.held, Tensor):
            with torch.no_grad():
                read = self.held.read(all_rows=True)
                # whoever gets the values may write on them, so backward computes its own
                known = self.kept.take()
                self.held = (read(self._all_rows()) if known is None else known).view(self.like.shape)
        return self.held

    def _all_rows(self) -> slice:
        return slice(0, self.like.shape[:-1].numel())

    def read(self) -> Read:
        """The function that returns rows of the logits, outside autograd."""
        if isinstance(self.held, Tensor):
            values = self.held.flatten(0, -2)
        else:
            read = self.held.read()
            if not self.kept.fits:
                return read
            values = self.kept.get(lambda: read(self._all_rows()))
        return lambda rows: rows_at(values, rows)

    def function(self, func: Any) -> Function | None:
        return self._function(func)
