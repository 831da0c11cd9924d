"""`patch_model` as a Trainer callback, for scripts that do not build their model themselves."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ..config import CompressionConfig, resolve
from ..config_file import tuples
from ..models.root import root_of
from ..patching import patch_model
from ..reporting import PatchReport, patch_report

logger = logging.getLogger(__name__)


class ActCompressCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Patches the Trainer's model when the Trainer is built, and again if `model_init` makes a new one.

    Its config is stored in the Trainer's checkpoints (trainer_state.json). A run that resumes with another config logs
    a warning. With ``TrainingArguments(restore_callback_states_from_checkpoint=True)`` it resumes with the
    checkpoint's.

    Args:
        config: As for `patch_model`, or the dict of a config. A preset's name means that preset with
            ``logits=False``, because a Trainer needs only the loss. A custom ``compute_loss`` may still read
            ``outputs.logits``, which are then computed for it. To read them after backward, pass
            ``CompressionConfig.from_preset("int8", logits=True)``.
        strict: Raise an error if nothing could be patched.

    Attributes:
        report: The PatchReport of the model that was patched last, or None.

    Raises:
        The errors of `patch_model`, when the Trainer is built.
    """

    def __init__(self, config: CompressionConfig | Mapping[str, Any] | str = "exact", *, strict: bool = True) -> None:
        if isinstance(config, str):
            config = CompressionConfig.from_preset(config, logits=False)
        self.config = CompressionConfig.from_dict(config) if isinstance(config, Mapping) else resolve(config)
        self.strict = strict
        self.report: PatchReport | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Patch the model before `accelerator.prepare`, so that DDP, FSDP and autocast wrap the patched model."""
        self._patch(model)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Patch a model that `model_init` made after the Trainer was built, or apply the checkpoint's config."""
        root = root_of(model) if model is not None else None
        if model is not None and (root is None or root.config != self.config):
            self._patch(model)
        saved = (state.stateful_callbacks or {}).get(type(self).__name__) if state.global_step else None
        before = saved and saved["args"]["config"]
        # values of JSON are compared: the checkpoint's codecs may not be registered in this process
        ours = self.config.to_dict()
        stored = {**CompressionConfig().to_dict(), **(before or ours)}
        other = {name: value for name, value in ours.items() if tuples(value) != tuples(stored[name])}
        if other:
            logger.warning(
                "the checkpoint was written under another config than this run's, which has %s; to go on as before, "
                "set TrainingArguments(restore_callback_states_from_checkpoint=True)", other,
            )  # fmt: skip

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint stores for this callback."""
        return {"args": {"config": self.config.to_dict(), "strict": self.strict}, "attributes": {}}

    def _patch(self, model: Any) -> None:
        if model is None:
            return
        patch_model(model, self.config, strict=self.strict)
        self.report = patch_report(model)
        logger.info("%s", self.report)
