"""Tiles of tokens and features with the largest norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...codecs.codec import Codec, TensorMeta, check_fraction, kept, meta_of
from ...codecs.feature_maps import FeatureMaps
from ...dispatch import implementation
from ...errors import UnknownOptionError

QUOTAS = ("column", "row", "global")


@dataclass(frozen=True)
class BlockSparse(Codec):
    """Keep the tiles of largest norm, exactly; the others come back as zero. dW is made of the kept tiles alone.

    The format is that of block-sparse rows: for each kept tile its elements and its position. Where every column or row
    of tiles keeps the same number, the row pointers of that format are not needed.

    Bytes: ``f (b + 4 / (br bc))`` per element of b bytes, f the kept fraction (tiles at the end count whole).
    Bias: yes, the weight gradient shrinks; deterministic.
    Source: structured activation pruning (arXiv 2311.16883); tile norm and quotas are this implementation's.

    Args:
        fraction: Kept tiles, in (0, 1].
        block: Tokens and features of a tile.
        quota: Among which tiles the largest are chosen: those of the same features ("column"; the products of the
            weight gradient are all of one size), of the same tokens ("row"), or all ("global").

    Raises:
        UnknownOptionError: Another quota.
        ValueError: A fraction outside (0, 1], a tile without elements.
    """

    takes_rows = True
    linear_only = True
    fraction: float = 0.3
    block: tuple[int, int] = (32, 32)
    quota: str = "column"

    def __post_init__(self) -> None:
        check_fraction(self.fraction)
        if self.quota not in QUOTAS:
            raise UnknownOptionError("quota", self.quota, QUOTAS)
        if min(self.block) < 1:
            raise ValueError(f"a tile has at least one row and one feature; found {self.block}")

    def _counts(self, x: TensorMeta) -> tuple[int, int]:
        """(tiles kept per quota, tiles kept in all)."""
        down, across = -(-x.rows // self.block[0]), -(-x.features // self.block[1])
        if self.quota == "global":
            k = kept(self.fraction, down * across)
            return k, k
        each, times = (across, down) if self.quota == "row" else (down, across)
        k = kept(self.fraction, each)
        return k, k * times

    def on_feature_maps(self) -> Codec:
        # it chooses among rows: pixels
        return FeatureMaps(self, pixels=True)

    def pack(self, x: Tensor) -> tuple[tuple[Tensor, ...], object]:
        meta = TensorMeta.of(x)
        rows = x.reshape(meta.rows, meta.features)
        return implementation("block_sparse_pack", x)(rows, self.block, self._counts(meta)[0], self.quota), meta

    def unpack(self, tensors: tuple[Tensor, ...], meta: object) -> Tensor:
        known = meta_of(meta)
        rows: Tensor = implementation("block_sparse_unpack", tensors[0])(*tensors, known.rows, known.features)
        return rows.view(known.shape)

    def grad_weight(self, dy: Tensor, tensors: tuple[Tensor, ...], meta: object) -> Tensor | None:
        known = meta_of(meta)
        if not known.shape.numel():
            return None
        grad = implementation("block_sparse_grad_weight", dy)
        out: Tensor = grad(dy.reshape(-1, dy.size(-1)), *tensors, known.features, self.quota)
        return out

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        tile = self.block[0] * self.block[1] * dtype.itemsize
        return self._counts(TensorMeta(shape, dtype))[1] * (tile + 4)
