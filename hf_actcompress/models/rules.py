"""One table of rules, by which a module becomes a site. The first rule that can patch the module decides."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..config import CompressionConfig
from ..errors import RuleError
from ..methods.chosen_tokens.model_layers import find_chosen_tokens
from ..modules.base import PatchedModule, Settings
from ..modules.checkpoint import CheckpointInputMixin
from ..modules.tiled import TiledSettings
from .adapters import find_adapter, rank_layers
from .attention import find_attention
from .checkpointing import find_checkpoint_input
from .gated_mlps import find_gated_mlp
from .heads import find_head, output_layers
from .in_parts import find_in_parts
from .leaves import find_leaf
from .rms_norms import find_rms_norm
from .root import pretrained_models
from .sites import Declined, Site
from .tiled_mlps import find_tiled_mlp

Rule = Callable[[nn.Module, CompressionConfig], Site | Declined | None]

# the rules, in the order in which they are tried
RULES: tuple[Rule, ...] = (
    find_head,
    find_chosen_tokens,
    find_checkpoint_input,
    find_leaf,
    find_rms_norm,
    find_gated_mlp,
    find_tiled_mlp,
    find_attention,
    find_adapter,
    find_in_parts,
)
# rules of other packages, which are tried first; their decision is final
OTHERS_RULES: list[Rule] = []


@dataclass(frozen=True)
class Places:
    """The modules, by `id`, that have a special place in the model around them.

    Attributes:
        heads: The output layers of all transformers models in the tree.
        of_rank: Linear layers whose inputs are as narrow as an adapter's rank.
    """

    heads: frozenset[int] = frozenset()
    of_rank: frozenset[int] = frozenset()

    @classmethod
    def of(cls, model: nn.Module) -> Places:
        return cls(
            frozenset(id(head) for part in pretrained_models(model).values() for head in output_layers(part)),
            frozenset(id(layer) for module in model.modules() for layer in rank_layers(module)),
        )


_NOWHERE = Places()


def find_site(module: nn.Module, config: CompressionConfig, places: Places = _NOWHERE) -> Site | Declined | None:
    """How `module` (not patched yet) is patched, why it is left alone, or None if no rule knows it.

    Args:
        config: The one that holds for this module.
        places: The places in the model around it; without them the module is looked at by itself.
    """
    if id(module) in places.of_rank:
        config = replace(config, linear="identity", derive_linear=True, gradient_norms=0)
    with _on_cpu():
        found = _by_others(module, config)
        if found is None:
            found = _own(module, config, id(module) in places.heads)
    # a checkpointed layer is patched by its checkpoint function, so a forward bound on the instance does not matter
    if not isinstance(found, Site) or "forward" not in module.__dict__ or found.mixin is CheckpointInputMixin:
        return found
    return Declined(
        found.settings.role,
        "forward is already bound on the instance (device_map or offload hooks, Liger, hub kernels), so a class "
        "swap would be inert; patch before that is applied",
    )


def _on_cpu() -> AbstractContextManager[Any]:
    """A context for the probes, which make small tensors: on the CPU, whatever `torch.set_default_device` was told.

    Where that is the default anyway, torch's own context would only slow down each call of a function of torch.
    """
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def _by_others(module: nn.Module, config: CompressionConfig) -> Site | Declined | None:
    """The first answer of the rules of other packages, once it has been checked."""
    for rule in OTHERS_RULES:
        found = rule(module, config)
        if found is None:
            continue
        if isinstance(found, Declined) or (isinstance(found, Site) and _is_whole(found)):
            return found
        name = getattr(rule, "__name__", repr(rule))
        raise RuleError(
            f"the rule {name} answered {found!r} for a {type(module).__name__}; it must return None, "
            "Declined(role, reason), or Site(a subclass of PatchedModule, Settings(...))"
        )
    return None


def _is_whole(site: Site) -> bool:
    patched = isinstance(site.mixin, type) and issubclass(site.mixin, PatchedModule)
    return patched and isinstance(site.settings, Settings)


def _own(module: nn.Module, config: CompressionConfig, is_head: bool) -> Site | Declined | None:
    """The first site that a rule of the table has for the module; else the first reason against one."""
    reason = None
    for rule in RULES if is_head else RULES[1:]:
        found = rule(module, config)
        if isinstance(found, Site):
            return found
        reason = reason or found
    return reason


def mlps_for_tiles(model: nn.Module) -> list[nn.Module]:
    """The MLPs of a model (not patched yet) that `tiled_mlp` computes in tiles."""
    config, places = CompressionConfig(tiled_mlp="auto"), Places.of(model)
    sites = ((module, find_site(module, config, places)) for module in list(model.modules()))
    return [
        module
        for module, site in sites
        if isinstance(site, Site) and isinstance(site.settings, TiledSettings) and site.settings.tile
    ]
