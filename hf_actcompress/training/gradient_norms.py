"""How WTA-CRS samples tokens: by the norm of x times the norm of the gradient in the last epoch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor, nn

from ..codecs import RowSample
from ..codecs.methods.gradient_norms import SiteNorms, samples_are
from ..errors import NotPatchedError
from ..modules.base import PatchedModule
from ..roles import Role


class GradientNorms:
    """A cache of gradient norms for every linear layer of a model whose codec samples tokens, by the samples' numbers.

    The preset "wtacrs" knows samples by what is in them and needs none of this. Numbers also work where the ids of a
    sample change (masks drawn anew in each epoch). For several epochs over a data set whose samples are always cut and
    padded alike: not for one epoch, packed or streamed data. Each process of a distributed run has its own cache, and
    knows nothing of what the others saw. The estimate stays unbiased whatever the cache holds.

    Args:
        model: Patched, e.g. with the preset "sampled"; unpatching it forgets the cache.
        samples: Of the data set.
        positions: Tokens of its longest sample.

    Saves:
        On the host, 4 bytes per sample, position and layer.

    Raises:
        NotPatchedError: No layer of the model samples tokens.

    Source:
        WTA-CRS (arXiv 2305.15265). There a sample that is new is not weighted at all, which is biased; here it counts
        with the mean of the others.
    """

    def __init__(self, model: nn.Module, samples: int, positions: int) -> None:
        self.sites: dict[str, SiteNorms] = {}
        for name, module in model.named_modules():
            settings = module.actcompress if isinstance(module, PatchedModule) else None
            if settings is not None and settings.role == Role.LINEAR and isinstance(settings.codec, RowSample):
                self.sites[name] = norms = SiteNorms(samples, positions)
                module.__dict__["actcompress"] = replace(settings, codec=replace(settings.codec, norms=norms))
        if not self.sites:
            raise NotPatchedError(
                f'no linear layer of {type(model).__name__} samples tokens; patch_model(model, "sampled") first'
            )

    @contextmanager
    def of(self, samples: Tensor) -> Iterator[None]:
        """Around the forward of a batch (under gradient checkpointing, around its backward too).

        Args:
            samples: ``[B]`` int64, the index in the data set of each sequence of the batch.
        """
        with samples_are(samples):
            yield
