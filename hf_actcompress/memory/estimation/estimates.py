"""Estimates of one model for several configs and sizes, before any weights or a GPU are at hand."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias, Unpack

import torch
from torch import nn

from ...config import CompressionConfig, Configured, resolve
from ...errors import ModelConfigError
from ...quick.diffusion import PictureSizes
from .assembly import About, assembled, name_of
from .checks import check_diffusion, check_processes, is_compiled, latents_for, tokens_of
from .extrapolation import Extrapolated, whole_step
from .fake_step.cuda_rules import BLOCK
from .fake_step.setting import Setting
from .fake_step.step import FakeStep, run_evaluation
from .fake_step.trl_head import check_trl
from .guess import largest_batch
from .layers import LayerRun, find_runs, with_names
from .meta_model import dtype_of, skeleton
from .model_copies import ModelCopies
from .reserved.repeated import Trace
from .reserved.replay import STEPS, Held, reserved_share
from .reserved.trace import trace_of
from .result import Estimate
from .states import held
from .states.optimizers import optimizer_rule
from .states.zero import Zero

# what a model is patched with; None and "stock": it is not patched
Asked: TypeAlias = CompressionConfig | Configured | str | None


class Estimates:
    """Estimates of one model for several configs and sizes. They share all work that does not depend on these.

    Args:
        model, dtype, optimizer, lora, device, autocast, engine, quantization, trust_remote_code,
            target_len, fsdp, zero, processes, trl, sizes: As for `estimate`.

    Raises:
        ActCompressError: One of the errors of `estimate`.
    """

    def __init__(
        self,
        model: Any,
        *,
        dtype: torch.dtype | str | None = None,
        optimizer: str = "adamw",
        lora: Any = None,
        device: str = "cuda",
        autocast: torch.dtype | str | None = None,
        engine: str | None = None,
        quantization: Any = None,
        trust_remote_code: bool = False,
        target_len: int | None = None,
        fsdp: int = 1,
        zero: int | None = None,
        processes: int = 1,
        trl: bool = False,
        **sizes: Unpack[PictureSizes],
    ) -> None:
        compiled = is_compiled(model, device, engine)
        check_processes(compiled, fsdp, zero, processes, trl)
        if (latents := latents_for(model, sizes)) is not None:
            other = {'engine="compile"': compiled, "fsdp": fsdp > 1, "trl": trl, "target_len": target_len}
            check_diffusion(**other, quantization=quantization)
        self._zero = None if zero is None else Zero(zero, processes)
        self._ddp = zero is None and processes > 1
        if zero is not None:
            dtype, autocast = autocast or dtype, None
        self._rule = optimizer_rule(optimizer)
        cuda, cast = device == "cuda", dtype_of(autocast)
        self._setting = Setting(1, 1, None, cuda, cast, compiled, target_len, fsdp, trl, latents)
        self._source = (model, dtype_of(dtype), lora, False, quantization, trust_remote_code)
        self._know_nothing()

    def _know_nothing(self) -> None:
        """Begin without any results."""
        # whether checkpointing is switched on -> the model
        self._models: dict[bool, nn.Module] = {}
        self._about: dict[bool, About] = {}
        self._states: dict[bool, held.States] = {}
        # (config, checkpointing) -> the latest step, whatever its batch was
        self._latest: dict[Any, Extrapolated] = {}
        # what a config sets for single layers -> the runs of equal layers
        self._runs: dict[Any, list[LayerRun]] = {}
        # (setting, checkpointing, whether the roles were asked for) -> the step
        self._steps: dict[Any, Extrapolated] = {}
        self._copies = ModelCopies()

    def changed(self, *, optimizer: str | None = None, lora: Any = None, quantization: Any = None) -> Estimates:
        """A copy with other options, which takes over all results that do not depend on these.

        Args:
            optimizer, lora, quantization: As for `estimate`. None: the option stays.
        """
        other = copy.copy(self)
        if optimizer is not None:
            other._rule, other._states = optimizer_rule(optimizer), {}
        if self._setting.latents is not None:
            check_diffusion(quantization=quantization)
        if lora is not None or quantization is not None:
            source = list(self._source)
            source[2], source[4] = lora or source[2], quantization or source[4]
            other._source = tuple(source)
            other._know_nothing()
        return other

    @property
    def _alike(self) -> bool | None:
        """True if further layers added the same bytes under any config so far; None if that is not known."""
        return any(found.alike for found in self._latest.values()) or None

    def tokens(self, seq_len: int | None) -> int:
        """Tokens of a sample: `seq_len`, or those of the latents. Raises ModelConfigError as `tokens_of`."""
        return tokens_of(self._setting.latents, seq_len)

    @property
    def model(self) -> nn.Module:
        """The model on the meta device, without checkpointing."""
        return self._model(False)

    def estimate(
        self,
        batch_size: int,
        seq_len: int,
        config: Asked,
        gradient_checkpointing: bool = False,
        *,
        by_role: bool = True,
    ) -> Estimate:
        """The estimate for this batch and config; see the function `estimate`.

        With `by_role=False` it takes less time, and all of `kept_by_role` may be under "other".
        """
        setting = self._case(batch_size, seq_len, config)
        found = self._step(setting, gradient_checkpointing, roles=by_role)
        states = self._state_bytes(gradient_checkpointing)
        notes = [] if self._zero is None else [self._zero.note(states)]
        notes += [held.DDP_NOTE] if self._ddp else []
        asked = _resolved(config)
        notes += [held.TILES_NOTE] if self._in_pieces and asked is not None and asked.always_in_tiles else []
        return assembled(found, self._described(gradient_checkpointing), setting, states, name_of(config), notes)

    def device_bytes(self, batch_size: int, seq_len: int, config: Asked, gradient_checkpointing: bool = False) -> int:
        """`Estimate.device_bytes` alone, which takes less time than the whole estimate."""
        setting = self._case(batch_size, seq_len, config)
        found = self._step(setting, gradient_checkpointing)
        return self._state_bytes(gradient_checkpointing).at_peak(found.step.peak) + held.context_bytes(setting)

    def replayed(
        self,
        batch_size: int,
        seq_len: int,
        config: Asked,
        gradient_checkpointing: bool = False,
        *,
        lengths: Sequence[int] = (),
        room: int = 0,
        by_role: bool = True,
    ) -> Estimate:
        """The estimate with the bytes that CUDA's caching allocator reserves for each byte of tensors, by a replay of
        the training's steps.

        On a CPU, compiled, with several processes, and if the layers are not alike, no step can be replayed.

        Args:
            batch_size, seq_len, config, gradient_checkpointing, by_role: As for `estimate`.
            lengths: Tokens per sequence in each of the steps; by default all have `seq_len`.
            room: Bytes; if the share without `expandable_segments` fits into them, the other one is not computed.
        """
        case = batch_size, seq_len, config, gradient_checkpointing
        found, training = self.estimate(*case, by_role=by_role), self._training(*case, lengths)
        if training is None:
            return found
        found = replace(found, reserved_share=(share := reserved_share(*training, False)))
        if found.reserved_bytes(share) <= room:
            return found
        return replace(found, reserved_share_expandable=reserved_share(*training, True))

    def _training(
        self, batch_size: int, seq_len: int, config: Asked, gradient_checkpointing: bool, lengths: Sequence[int]
    ) -> tuple[Held, list[Trace]] | None:
        """What `reserved_share` replays; None where no step can be replayed."""
        setting = self._case(batch_size, seq_len, config)
        if not setting.cuda or setting.compiled or setting.ranks > 1 or self._ddp or self._zero is not None:
            return None
        traces: dict[int, Trace | None] = {}
        for length in dict.fromkeys(lengths or [seq_len]):
            found = self._step(replace(setting, seq_len=length), gradient_checkpointing, traced=True)
            traces[length] = trace_of(found, BLOCK)
        steps = [trace for length in lengths or [seq_len] * STEPS if (trace := traces[length]) is not None]
        if None in traces.values():
            return None
        return held.held_by(self._model(gradient_checkpointing), self._rule), steps

    def guess(
        self, batch_size: int, seq_len: int, config: Asked, gradient_checkpointing: bool, room: int
    ) -> int | None:
        """The largest batch within `room` bytes, roughly, from the step of this batch; None if it does not tell."""
        setting, states = self._case(batch_size, seq_len, config), self._state_bytes(gradient_checkpointing)
        found = self._step(setting, gradient_checkpointing)
        at_rest = sum(states[:3]) + states.workspace + held.context_bytes(setting)
        return largest_batch(found, batch_size, room - at_rest, self._described(gradient_checkpointing).widths)

    def evaluation_bytes(self, batch_size: int, seq_len: int) -> int:
        """Bytes that a device needs to evaluate such a batch with labels while it also holds the training's states.

        The outputs exist as a whole, logits included, as in `Trainer.evaluate` with a stock model.
        """
        setting, whole = self._case(batch_size, seq_len, None), self._model(False)
        layers = find_runs(whole, CompressionConfig())
        found = whole_step(whole, lambda part, _: run_evaluation(part, setting), layers, self._alike)
        states = self._state_bytes(False)
        return sum(states[:3]) + found.step.peak + states.in_evaluation + held.context_bytes(setting)

    def frozen_elsewhere(self) -> int:
        """Bytes of frozen weights that could stay on the host if the device holds those of two layers at a time."""
        return held.frozen_elsewhere(self._model(False))

    def _case(self, batch_size: int, seq_len: int, config: Asked) -> Setting:
        resolved = _resolved(config)
        if self._setting.compiled and resolved is not None and resolved.offloads:
            raise ModelConfigError('what offloading keeps under torch.compile is not estimated; use engine="eager"')
        if resolved is not None and self._in_pieces:
            resolved = replace(resolved, tiled_mlp=0)
        return replace(self._setting, batch_size=batch_size, seq_len=seq_len, config=resolved)

    @property
    def _in_pieces(self) -> bool:
        """Whether hooks on each module bring its weights, so that layers have no plans and no MLP is in tiles."""
        return self._zero is not None and self._zero.stage == 3

    def _model(self, checkpointing: bool) -> nn.Module:
        if checkpointing not in self._models:
            # the model with checkpointing is a copy of the one without, which is made first
            source = (self._model(False), None, None, True) if checkpointing else self._source
            self._models[checkpointing] = skeleton(*source)
            if self._zero is not None:
                self._zero.prepare(self._models[checkpointing])
            if self._setting.trl_head:
                check_trl(self._models[checkpointing])
        return self._models[checkpointing]

    def _described(self, checkpointing: bool) -> About:
        if checkpointing not in self._about:
            self._about[checkpointing] = About.of(self._model(checkpointing))
        return self._about[checkpointing]

    def _state_bytes(self, checkpointing: bool) -> held.States:
        if checkpointing not in self._states:
            of = held.state_bytes if self._zero is None else self._zero.states
            found = of(self._model(checkpointing), self._setting, self._rule)
            # DistributedDataParallel copies each gradient into a bucket
            self._states[checkpointing] = found._replace(gradients=2 * found.gradients) if self._ddp else found
        return self._states[checkpointing]

    def _step(
        self, setting: Setting, checkpointing: bool, *, roles: bool = False, traced: bool = False
    ) -> Extrapolated:
        """The step of the whole model, with bytes by role and with what `trace_of` needs, if these are asked for."""
        for with_roles in {roles, True}:
            known = self._steps.get((setting, checkpointing, with_roles))
            if known is not None and (known.has_longer or not traced):
                return known
        whole = self._model(checkpointing)
        setting, config = with_names(setting, whole)
        single = config.overrides, config.checkpoint
        if single not in self._runs:
            self._runs[single] = find_runs(whole, config)
        # layers that are alike under one config are assumed alike under another; if they are not, it is checked again
        key = setting.config, checkpointing
        latest = self._latest.get(key)
        alike = latest.alike if latest else self._alike
        units = latest.units if latest and not (roles or traced) else None
        step = self._copies.run_step(whole, setting, checkpointing, self._runs[single])

        def run(part: nn.Module, wanted: bool) -> FakeStep:
            return step(part, setting, roles=roles and wanted)

        found = self._latest[key] = whole_step(whole, run, self._runs[single], alike, units)
        self._steps[setting, checkpointing, roles] = found
        return found


def _resolved(config: Asked) -> CompressionConfig | None:
    return None if config is None or config == "stock" else resolve(config)
