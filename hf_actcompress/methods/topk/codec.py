"""The largest entries only (DropIT)."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from ...codecs.codec import Codec, TensorMeta, check_fraction, kept, meta_of
from ...dispatch import implementation
from ...errors import UnknownOptionError
from .reference import index_dtype

SCOPES = ("row", "global", "nsigma")


@dataclass(frozen=True)
class TopK(Codec):
    """Keep the entries of largest magnitude, exactly; the others come back as zero.

    Bytes: per element of b bytes, with f the kept fraction: ``f b`` for the values, and the smaller of 1/8 (a bit mask)
    and ``f`` times 1, 2 or 4 (the index in a row of up to 2^8, 2^16 or more features); "global" is one row of all.
    Bias: yes, the weight gradient shrinks; deterministic. The entries themselves are exact.
    Source: DropIT (arXiv 2202.13808).

    Args:
        fraction: Kept entries, in (0, 1].
        scope: Among which entries the largest are chosen. "row": of each token, which costs no accuracy against
            "global" (the paper's). "nsigma": of each token the first ones, as many as `fraction` says, that are further
            from the mean than a normal distribution is with probability `fraction`; no sort.

    Raises:
        UnknownOptionError: Another scope.
        ValueError: A fraction outside (0, 1].
    """

    takes_rows = True
    linear_only = True
    fraction: float = 0.1
    scope: str = "row"

    def __post_init__(self) -> None:
        check_fraction(self.fraction)
        if self.scope not in SCOPES:
            raise UnknownOptionError("scope", self.scope, SCOPES)

    def _layout(self, x: TensorMeta) -> tuple[int, int, int, bool]:
        """(rows, features, kept per row, by mask)."""
        rows, features = (1, x.shape.numel()) if self.scope == "global" else (x.rows, x.features)
        k = kept(self.fraction, features)
        return rows, features, k, -(-features // 8) <= k * index_dtype(features).itemsize

    def pack(self, x: Tensor) -> tuple[tuple[Tensor, ...], object]:
        meta = TensorMeta.of(x)
        _, _, k, masked = self._layout(meta)
        sigmas = NormalDist().inv_cdf(1 - self.fraction / 2) if self.scope == "nsigma" else None
        rows = x.reshape(1, -1) if self.scope == "global" else x
        return implementation("topk_pack", x)(rows, k, masked, sigmas), meta

    def unpack(self, tensors: tuple[Tensor, ...], meta: object) -> Tensor:
        known = meta_of(meta)
        _, features, _, masked = self._layout(known)
        rows: Tensor = implementation("topk_unpack", tensors[0])(*tensors, features, masked)
        return rows.view(known.shape)

    def grad_weight(self, dy: Tensor, tensors: tuple[Tensor, ...], meta: object) -> Tensor | None:
        if self.scope == "global":
            return None
        _, features, _, masked = self._layout(meta_of(meta))
        out: Tensor = implementation("topk_grad_weight", dy)(dy.reshape(-1, dy.size(-1)), *tensors, features, masked)
        return out

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        rows, features, k, masked = self._layout(TensorMeta(shape, dtype))
        where = -(-features // 8) if masked else k * index_dtype(features).itemsize
        return rows * (k * dtype.itemsize + where)
