"""Runs of equal layers, so that two or three of them can stand for all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ...config import CompressionConfig
from ...models.checkpointing import below, layers_asked_for
from ..measurement.saved_tensors import layer_names
from .fake_step.setting import Setting

# attributes in which otherwise equal layers may differ
_POSITIONS = ("layer_idx", "layer_id", "layer_index", "idx", "training")
_LONGEST_PERIOD = 8


@dataclass(frozen=True)
class LayerRun:
    """Equal layers at the end of one ModuleList.

    Args:
        name: The list's name in the model.
        count: How many layers the list has.
        prefix: How many layers come before the run.
        period: Number of layers after which the kinds repeat (1: all are of one kind).
    """

    name: str
    count: int
    prefix: int
    period: int

    @property
    def units(self) -> int:
        """How many times the period repeats in the run."""
        return self.units_of(range(self.count))

    def units_of(self, layers: Any) -> int:
        """How many times the period repeats if the list has so many layers."""
        return (len(layers) - self.prefix) // self.period


def find_runs(model: nn.Module, config: CompressionConfig | None = None) -> list[LayerRun]:
    """The runs of the model's outermost lists of layers. A list in which no kinds repeat has none.

    Args:
        model: The model, stock, or with all layers patched in the same way.
        config: The config that it will be patched with. Layers that it treats differently are of different kinds.
    """
    modules = dict(model.named_modules())
    lists: dict[str, list[str]] = {}
    for name in layer_names(model):
        if _picked_by_number(model, modules, name):
            continue
        lists.setdefault(name.rpartition(".")[0], []).append(name)
    runs = (
        _run(name, [(_kind(modules[layer]), _treatment(modules[layer], layer, config)) for layer in layers])
        for name, layers in lists.items()
    )
    return [run for run in runs if run is not None]


def _picked_by_number(model: Any, modules: dict[str, Any], layer: str) -> bool:
    """Whether the model reads a tower's output from a layer whose index it computes from the config's layer count."""
    config: Any = getattr(model.get_base_model() if hasattr(model, "get_base_model") else model, "config", None)
    if not hasattr(config, "vision_feature_layer"):
        return False
    while layer:
        layer = layer.rpartition(".")[0]
        own = getattr(modules[layer], "config", None)
        if own is not None:
            return isinstance(own, type(config.vision_config))
    return False


def with_names(setting: Setting, whole: nn.Module) -> tuple[Setting, CompressionConfig]:
    """The setting with the names of the checkpointed layers, and its config.

    A shorthand such as "every:2" counts the layers of the whole model, while an estimate runs only a few of them.
    """
    config = setting.config or CompressionConfig()
    if setting.config is not None and isinstance(config.checkpoint, str):
        config = replace(config, checkpoint=layers_asked_for(whole, config.checkpoint))
        setting = replace(setting, config=config)
    return setting, config


def _treatment(layer: nn.Module, name: str, config: CompressionConfig | None) -> Any:
    """What a config sets for one layer alone: the overrides for its modules, and whether it is checkpointed."""
    if config is None or not (config.overrides or config.checkpoint):
        return None
    inside = [f"{name}.{module}" if module else name for module, _ in layer.named_modules()]
    codecs = tuple(
        tuple((field, codec) for part, field, codec in config.overrides if below(module, part)) for module in inside
    )
    return codecs, any(below(name, part) for part in config.checkpoint)


def _run(name: str, kinds: list[Any]) -> LayerRun | None:
    count = len(kinds)
    for period in range(1, _LONGEST_PERIOD + 1):
        prefix = count - period
        while prefix > 0 and kinds[prefix - 1] == kinds[prefix - 1 + period]:
            prefix -= 1
        # the run has whole periods only
        prefix += (count - prefix) % period
        if (count - prefix) // period >= 2:
            return LayerRun(name, count, prefix, period)
    return None


def _kind(layer: nn.Module) -> Any:
    """A value that is equal for two layers which need the same memory."""
    parameters = tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in layer.named_parameters())
    return parameters, tuple((name, type(module), _attributes(module)) for name, module in layer.named_modules())


def _attributes(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    plain = (bool, int, float, str, type(None))
    found = ((name, value) for name, value in vars(module).items() if name not in _POSITIONS)
    return tuple((name, value) for name, value in found if isinstance(value, plain))


@contextmanager
def shortened(
    model: nn.Module, units: Mapping[LayerRun, int], lists: Mapping[LayerRun, Any] | None = None
) -> Iterator[None]:
    """While the block runs, each list has so many units of its run, from the start.

    Args:
        model: The model.
        units: The number of units by run.
        lists: The original list by run, if the model itself has been shortened already.
    """
    before: dict[LayerRun, Any] = {run: model.get_submodule(run.name) for run in units}
    try:
        for run, count in units.items():
            layers = list((lists or before)[run])[: run.prefix + count * run.period]
            model.set_submodule(run.name, nn.ModuleList(layers))
        yield
    finally:
        for run, whole in before.items():
            model.set_submodule(run.name, whole)
