"""`patch_model` as a Trainer callback, for scripts that do not build their model themselves."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers.trainer_callback import ExportableState

from ..config import CompressionConfig, resolve
from ..config_file import tuples
from ..models.root import root_of
from ..patching import patch_model
from ..reporting import PatchReport, patch_report
from .memory_callback import MEASURED, MemoryCallback, handler_above

logger = logging.getLogger(__name__)


class ActCompressCallback(MemoryCallback, ExportableState):  # type: ignore[misc]
    """Patches the Trainer's model when the Trainer is built, and again if `model_init` makes a new one.

    It prints what it patched in one line, on the main process, unless `log_level` hides warnings. It logs the memory of
    the steps as a `MemoryCallback` with its defaults does; add one of your own for another `every` or an estimate. On
    devices whose memory cannot be measured it logs none.

    Its config is stored in the Trainer's checkpoints (trainer_state.json). A run that resumes with another config logs
    a warning. With ``TrainingArguments(restore_callback_states_from_checkpoint=True)`` it resumes with the
    checkpoint's.

    After ``import hf_actcompress.training``, ``TrainingArguments(report_to="actcompress")`` adds one with the defaults.

    Args:
        config: As for `patch_model`, or the dict of a config.
        strict: Raise an error if nothing could be patched.
        compile: As for `patch_model`.
        log_memory: Log kept bytes and peak. On a CUDA device this resets the statistics of the peak in each step.

    Attributes:
        report: The PatchReport of the model that was patched last, or None.

    Raises:
        ActCompressError: One of the errors of `patch_model`, when the Trainer is built.
    """

    def __init__(
        self,
        config: CompressionConfig | Mapping[str, Any] | str = "exact",
        *,
        strict: bool = True,
        compile: bool | None = None,
        log_memory: bool = True,
    ) -> None:
        super().__init__()
        found = CompressionConfig.from_dict(config) if isinstance(config, Mapping) else resolve(config)
        self.config = found if compile is None else replace(found, compile=compile)
        self.strict, self.log_memory = strict, log_memory
        self.report: PatchReport | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Patch the model before `accelerator.prepare`, so that DDP, FSDP and autocast wrap the patched model."""
        super().on_init_end(args, state, control)
        self._patch(model, args, state)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Patch a model that `model_init` made after the Trainer was built, or apply the checkpoint's config."""
        root = root_of(model) if model is not None else None
        if model is not None and (root is None or root.config != self.config):
            self._patch(model, args, state)
        super().on_train_begin(args, state, control, model=model)
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
        options = {"strict": self.strict, "log_memory": self.log_memory}
        return {"args": {"config": self.config.to_dict(), **options}, "attributes": {}}

    def _wanted(self, device: torch.device) -> bool:
        handler = handler_above()
        # the user's own has other options
        other = handler is not None and any(type(callback) is MemoryCallback for callback in handler.callbacks)
        return self.log_memory and device.type in MEASURED and not other

    def _patch(self, model: Any, args: Any, state: Any) -> None:
        if model is None:
            return
        patch_model(model, self.config, strict=self.strict)
        self.report = patch_report(model)
        logger.info("%s", self.report)
        # as transformers prints its log entries; no progress bar is on the screen yet
        if state.is_world_process_zero and args.get_process_log_level() <= logging.WARNING:
            print(f"hf_actcompress: {self.report.line(self.config)}")
