"""`patch_model` as a Trainer callback, for scripts that do not build their model themselves."""

from __future__ import annotations

import logging
from typing import Any

from transformers import TrainerCallback

from ..config import CompressionConfig, resolve
from ..models.root import root_of
from ..patching import patch_model
from ..reporting import PatchReport, patch_report

logger = logging.getLogger(__name__)


class ActCompressCallback(TrainerCallback):  # type: ignore[misc]
    """Patches the Trainer's model when the Trainer is built, and again if `model_init` makes a new one.

    Args:
        config: As for `patch_model`. A preset's name means that preset with ``logits=False``: the loss is all that a
            Trainer needs, and a ``compute_loss`` of one's own may still read ``outputs.logits``, which are then
            computed for it. To read them after backward, give ``CompressionConfig.from_preset("int8", logits=True)``.
        strict: Raise if nothing could be patched.

    Attributes:
        report: The PatchReport of the model that was patched last, or None.

    Raises:
        As `patch_model`, when the Trainer is built.
    """

    def __init__(self, config: CompressionConfig | str = "exact", *, strict: bool = True) -> None:
        if isinstance(config, str):
            config = CompressionConfig.from_preset(config, logits=False)
        self.config = resolve(config)
        self.strict = strict
        self.report: PatchReport | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Before `accelerator.prepare`, so that DDP, FSDP and autocast wrap the patched model."""
        self._patch(model)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Only does something for a model that `model_init` made after the Trainer was built."""
        if model is not None and root_of(model) is None:
            self._patch(model)

    def _patch(self, model: Any) -> None:
        if model is None:
            return
        patch_model(model, self.config, strict=self.strict)
        self.report = patch_report(model)
        logger.info("%s", self.report)
