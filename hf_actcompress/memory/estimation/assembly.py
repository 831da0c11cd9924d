"""Builds the estimate of the whole model from the steps of shortened models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...config import resolve
from ...models.root import root_module
from ..measurement.saved_tensors import layer_names
from .extrapolation import Extrapolated, whole_step
from .fake_step.pictures import described, takes_pictures
from .fake_step.setting import Setting
from .fake_step.step import run_step
from .guess import widths
from .layers import find_runs, with_names
from .quantized.model import notes_of
from .result import Estimate
from .states.held import States, context_bytes, state_bytes
from .states.optimizers import OptimizerRule

ENGINES = ("eager", "compile")


@dataclass(frozen=True)
class About:
    """What is read off all modules of a model once, because a large model with adapters has thousands.

    Args:
        name: Class of the model.
        layers: How many layers it has.
        notes: What limits any estimate of it.
        widths: Bytes of its weights and of their copies in other dtypes; see `largest_batch`.
    """

    name: str
    layers: int
    notes: tuple[str, ...]
    widths: frozenset[int]

    @classmethod
    def of(cls, whole: nn.Module) -> About:
        notes = [described(whole)] if takes_pictures(whole) else []
        layers = len(list(layer_names(whole)))
        return cls(type(root_module(whole)).__name__, layers, (*notes, *notes_of(whole)), widths(whole.parameters()))


def estimate_of(whole: nn.Module, setting: Setting, rule: OptimizerRule, name: str) -> Estimate:
    """The estimate of a model on the meta device; `name` is the name that the estimate shows for its config."""
    setting, config = with_names(setting, whole)
    found = whole_step(whole, lambda part, roles: run_step(part, setting, roles=roles), find_runs(whole, config))
    return assembled(found, About.of(whole), setting, state_bytes(whole, setting, rule), name)


def assembled(
    found: Extrapolated, about: About, setting: Setting, states: States, name: str, notes: Sequence[str] = ()
) -> Estimate:
    """The estimate of a model, put together from its step and from what is held beside the step."""
    return Estimate(
        model=about.name,
        device="cuda" if setting.cuda else "cpu",
        batch_size=setting.batch_size,
        seq_len=setting.seq_len,
        config=name,
        engine=ENGINES[setting.compiled],
        weights_bytes=states.weights,
        gradients_bytes=states.gradients,
        optimizer_bytes=states.optimizer,
        optimizer_step_bytes=states.optimizer_step,
        kept_bytes=found.step.kept,
        kept_by_role=found.step.all_roles,
        kept_per_layer=found.per_layer,
        layers=about.layers,
        step_peak_bytes=found.step.peak + states.workspace,
        context_bytes=context_bytes(setting),
        notes=(*about.notes, *_notes(setting), *notes),
    )


def name_of(config: Any) -> str:
    """The name that the estimate shows for a config."""
    if config is None:
        return "stock"
    return config if isinstance(config, str) else str(resolve(config))


def _notes(setting: Setting) -> Iterator[str]:
    if setting.latents is not None:
        yield (
            f"a sample is {setting.latents.tokens:,} latents or tokens of them; latents and the states of captions are "
            "cached, so that the VAE and the text encoders are not on the card"
        )
    if setting.config is not None and setting.config.share_prompts:
        yield (
            "share_prompts=True is estimated for sequences that begin with different tokens: where they begin with the "
            "same ones less is kept, and memory_report(model, batch) measures it"
        )
