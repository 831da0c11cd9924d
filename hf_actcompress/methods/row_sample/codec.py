"""Sampled tokens: an unbiased estimate of a linear's weight gradient."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...codecs.codec import Codec, TensorMeta, check_fraction, kept, meta_of
from ...codecs.feature_maps import FeatureMaps
from ...compiling import is_compiling
from ...dispatch import implementation
from ...errors import UnknownOptionError
from ...reference.rng import Generators, drawn_from
from .codec_gradient_norms import SiteNorms, samples_now

DRAWS = ("independent", "stratified")


@dataclass(frozen=True)
class SampledMeta(TensorMeta):
    """The static half for rows whose sequences have known numbers."""

    samples: tuple[int, ...]


@dataclass(frozen=True)
class RowSample(Codec):
    """Keep a fixed number of tokens, chosen by their norms, scaled so that the weight gradient is right on average.

    Winner-take-all: the tokens of largest norm are kept for certain, as many as lower the variance; the others are
    drawn. The weights are folded into the kept rows. The best probabilities would have the norm of dy as a factor,
    which the forward does not know; the norm of x alone costs variance, never bias. All consumers of a tensor share one
    sample. With `norms`, as in the paper, the factor is the norm of dy when the same sample came last: see
    ``CompressionConfig.gradient_norms``, and ``training.GradientNorms`` for those who number their samples.

    Bytes: ``f (b + 4 / D)`` per element of b bytes, f the kept fraction.
    Bias: none in dW (of any number of tokens). The rounding of the scaled rows to x's dtype is to nearest. A row that
        is drawn has the mean norm over f: in fp16 that can overflow, which shows as inf.
    Source: WTA-CRS (arXiv 2305.15265); column-row sampling, Drineas et al. (2006).

    Args:
        fraction: Kept tokens, in (0, 1].
        winner_take_all: Keep the largest for certain; False: plain column-row sampling.
        draws: "independent" (the paper's), or "stratified": one from each of equal parts of the distribution, which is
            as unbiased and draws the same token twice less often.
        norms: Norms of earlier gradients at the place where this codec is used; no part of the format.
        generators: The generators that tokens are drawn with; not part of the format. None: those of the process.

    Raises:
        UnknownOptionError: Other draws.
        ValueError: A fraction outside (0, 1].
    """

    linear_only = True
    fraction: float = 0.3
    winner_take_all: bool = True
    draws: str = "independent"
    norms: SiteNorms | None = field(default=None, compare=False, repr=False)
    generators: Generators | None = field(default=None, compare=False, repr=False)

    @property
    def takes_rows(self) -> bool:
        # remembered norms are addressed by the position in a sequence
        return self.norms is None

    def __post_init__(self) -> None:
        check_fraction(self.fraction)
        if self.draws not in DRAWS:
            raise UnknownOptionError("draws", self.draws, DRAWS)

    def on_feature_maps(self) -> Codec:
        # it chooses among rows: pixels
        return FeatureMaps(self, pixels=True)

    def pack(self, x: Tensor) -> tuple[tuple[Tensor, ...], object]:
        meta = TensorMeta.of(x)
        rows, k = x.reshape(meta.rows, meta.features), kept(self.fraction, meta.rows)
        pack, stratified = implementation("row_sample_pack", x), self.draws == "stratified"
        samples = self._samples()
        if self.norms is None or samples is None or not self.norms.fits(meta.rows, samples):
            return drawn_from(self.generators, pack, rows, k, self.winner_take_all, stratified), meta
        factor = self.norms.expect(meta.rows, samples).to(x.device)
        tensors = drawn_from(self.generators, pack, rows, k, self.winner_take_all, stratified, factor)
        return tensors, SampledMeta(meta.shape, meta.dtype, tuple(samples.tolist()))

    def _samples(self) -> Tensor | None:
        """Numbers [B] of the sequences that are packed now, if somebody has said which they are."""
        if self.norms is None or is_compiling():
            return None
        samples = samples_now()
        return samples if samples is not None or self.generators is None else self.generators.samples

    def unpack(self, tensors: tuple[Tensor, ...], meta: object) -> Tensor:
        known = meta_of(meta)
        rows: Tensor = implementation("row_sample_unpack", tensors[0])(*tensors, known.rows)
        return rows.view(known.shape)

    def grad_weight(self, dy: Tensor, tensors: tuple[Tensor, ...], meta: object) -> Tensor | None:
        rows = dy.reshape(-1, dy.size(-1))
        if self.norms is not None and isinstance(meta, SampledMeta):
            self.norms.note(rows, torch.tensor(meta.samples))
        out: Tensor = implementation("row_sample_grad_weight", dy)(rows, *tensors)
        return out

    def drawing_from(self, generators: Generators) -> Codec:
        return replace(self, generators=generators)

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        x = TensorMeta(shape, dtype)
        return kept(self.fraction, x.rows) * (x.features * dtype.itemsize + 4)
