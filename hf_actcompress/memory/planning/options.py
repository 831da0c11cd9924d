"""The ways to keep a layer, with the bytes that training steps on fake tensors show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Generic, TypeVar

from torch import nn

from ...codecs import Offload
from ...codecs.table import CODECS
from ...config import PRESETS, CompressionConfig
from ...errors import UnsupportedModelError
from ...roles import Role
from ..estimation.fake_step.arithmetic import Work
from ..estimation.fake_step.step import FakeStep
from ..estimation.layers import LayerRun, find_runs, shortened
from .costs import GROUPS, DeviceModel, checkpoint_time, codec_error, storage_time
from .knapsack import Weighed

# presets that differ in how each tensor is stored
STORAGE = ("exact", "int8", "fp8", "int4", "offload")
# ways to run the layer's forward again in backward, and the fields that are set for that layer beside `checkpoint`
CHECKPOINTS: dict[str, tuple[tuple[str, str], ...]] = {
    "checkpoint": (),
    "checkpoint_with_attention": (("checkpoint_attention", "kept"),),
    "compressed_checkpoint": (("checkpoint_input", "int8_outliers"),),
    "offloaded_checkpoint": (("checkpoint_input", "offload"),),
}
# what holds for the whole model, and the fields of its config; exact
TILES: dict[str, Any] = {"tiled_mlp": "auto"}
OPTIONS = (*STORAGE, *CHECKPOINTS, "tiles")

# what the printed plan says of each
MEANINGS = {
    "exact": "what is cheap to rebuild is rebuilt in backward",
    "int8": "stored in 8 bits",
    "fp8": "stored in 8 bits, as floating point",
    "int4": "stored in 4 bits",
    "offload": "moved to host memory",
    "checkpoint": "the layer runs again in backward",
    "checkpoint_with_attention": "the layer runs again in backward, but for attention's kernel",
    "compressed_checkpoint": "the layer runs again in backward, from its input in 8 bits",
    "offloaded_checkpoint": "the layer runs again in backward, its input moved to host memory",
}

# what an error of 1 costs: under "fidelity" more than any extra time of all layers of a model, under "speed" it decides
# between choices that take the same time
_ERROR_COSTS = {"fidelity": 1e6, "speed": 1e-6}

# group -> the fields of a config that name the codecs of the group's roles
_FIELDS = {group: tuple(dict.fromkeys(role.field for role in Role if role.group == group)) for group in GROUPS}


@dataclass(frozen=True)
class LayerOption:
    """One way to keep a layer.

    Args:
        name: A key of CHECKPOINTS, or the presets of the groups: "int8", or "int8/exact/int8" for norm, MLP,
            attention.
        settings: What is set for that layer alone, as (field of a CompressionConfig, value); mostly codecs of
            roles.
        nbytes: Bytes that the layer keeps.
        time: Extra time, as a fraction of the layer's forward and backward.
        error: Relative error of the stored tensors, averaged over the groups.
    """

    name: str
    settings: tuple[tuple[str, str], ...]
    nbytes: int
    time: float
    error: float

    def weighed(self, objective: str) -> Weighed:
        """The cost: under "fidelity" error comes first and time second, under "speed" the other way round."""
        return Weighed(self.nbytes, self.time + _ERROR_COSTS[objective] * self.error)


# a step's bytes or its arithmetic
_Step = TypeVar("_Step", FakeStep, Work)


@dataclass(frozen=True)
class Measured(Generic[_Step]):
    """What the step of a whole model takes, and what one more layer of each run of equal layers adds to it."""

    whole: _Step
    layers: dict[LayerRun, _Step]


def config_of_option(option: str, layers: tuple[str, ...] = ()) -> CompressionConfig:
    """The config that keeps all of these layers as one of OPTIONS says."""
    if option in CHECKPOINTS:
        return CompressionConfig(checkpoint=layers, **dict(CHECKPOINTS[option]))  # type: ignore[arg-type]
    return replace(PRESETS["exact"], **TILES) if option == "tiles" else PRESETS[option]


def to_measure(allow: Sequence[str], may_checkpoint: bool) -> list[str]:
    """The options to run: the allowed ones, and "checkpoint" beside any other checkpoint, to find the input's bytes."""
    asked = dict.fromkeys(allow)
    if not may_checkpoint:
        return [option for option in asked if option not in CHECKPOINTS]
    return list(dict.fromkeys([*asked, *(["checkpoint"] if asked.keys() & CHECKPOINTS.keys() else [])]))


def measure(model: nn.Module, run: Callable[[nn.Module], _Step]) -> Measured[_Step]:
    """Run a model's step and find what a layer adds. Raises UnsupportedModelError if no two layers are alike."""
    runs = [found for found in find_runs(model) if found.units >= 2]
    if not runs:
        raise UnsupportedModelError(f"{type(model).__name__} has no two layers of one kind; there is nothing to plan")
    units = {found: min(2, found.units - 1) for found in runs}
    with shortened(model, units):
        base = run(model)
    whole, layers = base, {}
    for found in runs:
        with shortened(model, {**units, found: units[found] + 1}):
            added = run(model).plus(base, -1)
        whole = whole.plus(added, found.units - units[found])
        layers[found] = added.divided(found.period)
    return Measured(whole, layers)


def layer_options(
    run: LayerRun,
    measured: dict[str, Measured[FakeStep]],
    work: Work,
    device: DeviceModel,
    tiles: bool = False,
) -> list[LayerOption]:
    """Every way to keep a layer of this run, with what `measured` says of each preset.

    Under `tiles` the MLPs are recomputed in backward. A checkpointed layer computes them again in any case.
    """
    presets = [name for name in STORAGE if name in measured]
    exact = measured["exact"].layers[run]
    sizes = {name: _by_group(measured[name].layers[run]) for name in presets}
    found: dict[tuple[tuple[str, str], ...], LayerOption] = {}
    for choice in product(presets, repeat=len(GROUPS)):
        option = _stored(dict(zip(GROUPS, choice, strict=True)), exact.kept, sizes, work, device)
        option = replace(option, time=option.time + work.mlp / work.step) if tiles else option
        # two names can mean the same settings, because presets share codecs; the first one stays
        found.setdefault(option.settings, option)
    options = list(found.values())
    kept = {name: measured[name].layers[run].kept for name in CHECKPOINTS if name in measured}
    return [*options, *(_checkpoint(name, kept, work, device) for name in kept)]


def _checkpoint(name: str, kept: dict[str, int], work: Work, device: DeviceModel) -> LayerOption:
    settings, raw = CHECKPOINTS[name], kept["checkpoint"]
    # attention's kernel runs again unless its output is kept, which shows in the layer's bytes
    keeps_attention = ("checkpoint_attention", "kept") in settings and kept[name] > raw
    time = checkpoint_time(work, attention_again=not keeps_attention)
    codec = dict(settings).get("checkpoint_input", "identity")
    if codec != "identity":
        offloaded = {"input"} if isinstance(CODECS[codec], Offload) else set()
        time += storage_time(work, {"input": raw}, {"input": kept[name]}, offloaded, device)
    return LayerOption(name, settings, kept[name], time, codec_error(codec))


def _stored(
    choice: dict[str, str], exact: int, sizes: dict[str, dict[str, int]], work: Work, device: DeviceModel
) -> LayerOption:
    packed = {group: preset for group, preset in choice.items() if preset != "exact"}
    raw = {group: sizes["exact"][group] for group in packed}
    small = {group: sizes[preset][group] for group, preset in packed.items()}
    offloaded = {group for group, preset in packed.items() if preset == "offload"}
    names = list(dict.fromkeys(choice.values()))
    settings = tuple(
        (field, codec)
        for group, preset in packed.items()
        for field in _FIELDS[group]
        if (codec := getattr(PRESETS[preset], field)) != "identity"
    )
    main = (codec_error(getattr(PRESETS[preset], group)) for group, preset in packed.items())
    return LayerOption(
        name=names[0] if len(names) == 1 else "/".join(choice.values()),
        settings=settings,
        nbytes=exact - sum(raw.values()) + sum(small.values()),
        time=storage_time(work, raw, small, offloaded, device),
        error=sum(main) / len(GROUPS),
    )


def _by_group(step: FakeStep) -> dict[str, int]:
    sizes = dict.fromkeys(GROUPS, 0)
    for role, nbytes in step.by_role.items():
        if group := Role(role).group:
            sizes[group] += nbytes
    return sizes


def config_of(layers: Iterable[tuple[str, LayerOption]]) -> CompressionConfig:
    """The config that keeps each named layer as its option says."""
    chosen = list(layers)
    return CompressionConfig(
        overrides=tuple((name, field, value) for name, option in chosen for field, value in option.settings),
        checkpoint=tuple(name for name, option in chosen if option.name in CHECKPOINTS),
    )
