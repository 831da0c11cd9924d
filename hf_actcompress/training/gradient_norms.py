"""Gradient norms for WTA-CRS, which samples tokens by the norm of x times the gradient's norm in the last epoch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor, nn

from ..errors import NotPatchedError
from ..methods.row_sample.codec import RowSample
from ..methods.row_sample.codec_gradient_norms import SiteNorms, samples_are
from ..modules.base import settings_of
from ..roles import Role


class GradientNorms:
    """A cache of gradient norms, by sample number, for each linear layer of a model whose codec samples tokens.

    The preset "wtacrs" recognises samples by their content and does not need this class. Numbers also work if the ids
    of a sample change (masks that are drawn anew in each epoch). Use it for several epochs over a data set whose
    samples are always cut and padded alike, not for one epoch, or packed or streamed data. Each process of a
    distributed run has its own cache, which does not know the samples of the others. The estimate has no bias whatever
    the cache holds.

    Args:
        model: A model patched, for instance, with the preset "sampled". Unpatching it drops the cache.
        samples: Number of samples in the data set.
        positions: Number of tokens of its longest sample.

    Saves:
        4 bytes per sample, position and layer, in host memory.

    Raises:
        NotPatchedError: No layer of the model samples tokens.

    Source:
        WTA-CRS (arXiv 2305.15265). There a new sample has no weight, which is biased; here it gets the mean weight of
        the others.
    """

    def __init__(self, model: nn.Module, samples: int, positions: int) -> None:
        self.sites: dict[str, SiteNorms] = {}
        for name, module in model.named_modules():
            settings = settings_of(module)
            if settings is not None and settings.role == Role.LINEAR and isinstance(settings.codec, RowSample):
                self.sites[name] = norms = SiteNorms(samples, positions)
                module.__dict__["actcompress"] = replace(settings, codec=replace(settings.codec, norms=norms))
        if not self.sites:
            raise NotPatchedError(
                f'no linear layer of {type(model).__name__} samples tokens; patch_model(model, "sampled") first'
            )

    @contextmanager
    def of(self, samples: Tensor) -> Iterator[None]:
        """Use it around the forward of a batch (with gradient checkpointing, around its backward as well).

        Args:
            samples: ``[B]`` int64, the index in the data set of each sequence of the batch.
        """
        with samples_are(samples):
            yield
