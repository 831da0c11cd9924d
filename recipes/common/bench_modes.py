"""What the benchmark compares: stock transformers, its memory savers, the peers, and every preset."""

import copy
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._inductor.compile_fx import compile_fx

from common.liger import apply_liger, has_kernels
from hf_actcompress import PRESETS, CompressionConfig, patch_model

Forward = Callable[..., Any]
EXACT = ("exact", "offload")


@dataclass(frozen=True)
class Mode:
    """One column of the comparison.

    Args:
        prepare: Takes a stock model, whose weights it may share with others, and returns the callable that runs in its
            place.
        exact: Whether its gradients must equal stock's up to rounding.
        same_masks: Whether its dropout draws the same masks as stock from the same seed.
        needs: A package that must be installed, or "".
        compiled: Whether its first step includes a compiler's time.
    """

    prepare: Callable[[Any], Forward]
    exact: bool = True
    same_masks: bool = True
    needs: str = ""
    compiled: bool = False

    def reason_missing(self, family: str, device: str) -> str:
        """Why it cannot run with models of that family on this device, or ""."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"{self.needs} is not installed"
        if self.needs == "liger_kernel" and device != "cuda":
            return "its kernels need a GPU"
        if self.needs == "liger_kernel" and not has_kernels(family):
            return f"it has no kernels for {family}"
        return ""


def _checkpointed(model: Any) -> Any:
    # transformers 5.23 renamed it
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    return model


def _compiled(model: Any, memory_budget: float = 1.0, **options: Any) -> Forward:
    """The model under Inductor, with these options of `torch._inductor.config`."""

    def backend(graph: Any, inputs: Any) -> Any:
        # the option is read when the graph is partitioned
        with torch._functorch.config.patch(activation_memory_budget=memory_budget):
            return compile_fx(graph, inputs, config_patches=options or None)

    # a new backend each time: with the same one, dynamo would use what it compiled for another model of the class
    return torch.compile(model, backend=backend)


def _patched_and_compiled(model: Any, preset: str) -> Forward:
    return _compiled(patch_model(model, preset))


MODES: dict[str, Mode] = {
    "stock": Mode(lambda model: model),
    "checkpointing": Mode(_checkpointed),
    # these two show what a compiler's rounding alone does to gradients
    "compile": Mode(_compiled, exact=False, same_masks=False, compiled=True),
    "compile, budget 0.5": Mode(partial(_compiled, memory_budget=0.5), exact=False, same_masks=False, compiled=True),
    "liger": Mode(apply_liger, needs="liger_kernel"),
    "liger+checkpointing": Mode(lambda model: _checkpointed(apply_liger(model)), needs="liger_kernel"),
    **{name: Mode(partial(patch_model, config=name), exact=name in EXACT) for name in PRESETS},
    "exact+checkpointing": Mode(lambda model: _checkpointed(patch_model(model))),
    "long+checkpointing": Mode(lambda model: _checkpointed(patch_model(model, "long"))),
    "exact+compressed checkpoint": Mode(
        lambda model: _checkpointed(patch_model(model, CompressionConfig(checkpoint_input="int8_outliers"))),
        exact=False,
    ),
    "checkpointing+compile": Mode(lambda model: _compiled(_checkpointed(model)), same_masks=False, compiled=True),
    "exact+checkpointing+compile": Mode(
        lambda model: _compiled(_checkpointed(patch_model(model))), same_masks=False, compiled=True
    ),
    **{
        f"{name}+compile": Mode(
            partial(_patched_and_compiled, preset=name), exact=name in EXACT, same_masks=False, compiled=True
        )
        for name in ("exact", "int8", "int4")
    },
    # each kind of layer is compiled once, and what is around the layers runs as it is
    **{
        f"{name} layers-compiled": Mode(
            partial(patch_model, config=name, compile=True), exact=name in EXACT, same_masks=False, compiled=True
        )
        for name in ("exact", "int8", "int4")
    },
    "exact+checkpointing layers-compiled": Mode(
        lambda model: _checkpointed(patch_model(model, compile=True)), same_masks=False, compiled=True
    ),
    "int8+compile, no reuse": Mode(
        lambda model: _compiled(patch_model(model, "int8"), allow_buffer_reuse=False),
        exact=False,
        same_masks=False,
        compiled=True,
    ),
}
DEFAULT_MODES = ("stock", "checkpointing", "exact", "exact+checkpointing")


def sharing_weights(model: Any) -> Any:
    """A copy of the modules with the same parameters and gradients, so that modes side by side share the weights."""
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, memo=dict(parameters))
