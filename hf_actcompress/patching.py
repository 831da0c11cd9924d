"""patch_model and its inverse: find the sites of a model and swap their classes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TypeVar

from torch import nn

from .compilation import register
from .config import CUSTOM, CompressionConfig, Configured, preset_of, resolve
from .errors import NothingPatchedError, UnknownOptionError, UnsupportedModelError
from .layers import blocks_named, find_plans, outside_of, store_for_model, units_of
from .methods.chosen_tokens.model_layers import refuse_choice
from .models.checkpointing import restore_checkpointing, switch_on
from .models.probe import answers_kept
from .models.root import install_roots, is_root, restore_root, root_of
from .models.rules import Places, find_site
from .models.sites import Site
from .modules.base import PatchedModule, patch_instance, settings_of, unpatch_instance
from .modules.checkpoint import CheckpointSettings
from .modules.hooked import take_off_hooks
from .reference.rng import Generators
from .reporting import is_parametrization, patch_report
from .roles import Role
from .versions import untested, version_of

register()
logger = logging.getLogger(__name__)
# how many reasons a warning names
_TOLD = 3
_Model = TypeVar("_Model", bound=nn.Module)


def patch_model(
    model: _Model,
    config: CompressionConfig | Configured | str = "exact",
    *,
    strict: bool = True,
    seed: int | None = None,
    compile: bool | None = None,
) -> _Model:
    """Make a model keep fewer bytes between forward and backward. In place; call it before Trainer or `prepare`.

    Args:
        model: A transformers model, bare or wrapped by PEFT (before or after `get_peft_model`), or any module that
            contains one. It must not be on the meta device, nor wrapped by DDP or FSDP.
        config: A preset's name, a CompressionConfig, or an object that carries one (a plan, a calibration). The
            default keeps gradients exact.
        strict: Raise an error if nothing could be patched.
        seed: The seed of stochastic codecs; by default torch's initial seed. It does not affect dropout. Each model
            has its own generators, which start again when a seed is given. A deep copy or an unpickled model
            continues from the original's state, independently of it.
        compile: Whether Inductor makes the code of layers (`CompressionConfig.compile`); None: as the config says.

    Returns:
        The same model. A second call with the same config patches what is new in the model; a call with another
        config starts again from the stock classes.

    Saves:
        See `memory_report(model, batch)`; state_dict, save_pretrained, generate and eval are those of the stock model.

    Raises:
        NothingPatchedError: `strict` is set and no module was patched.
        UnknownOptionError: A preset or codec is unknown, or an override or a layer to checkpoint does not exist.
        UnsupportedModelError: The model is wrapped by DDP or FSDP, is on the meta device, or is no module.
    """
    resolved = resolve(config)
    if compile is not None:
        resolved = replace(resolved, compile=compile)
    _check(model)
    _check_names(model, resolved)
    _warn_if_lossy(resolved)
    root = root_of(model)
    generators = root.generators if root is not None else Generators(seed)
    if seed is not None:
        generators.restart(seed)
    if root is None or root.config != resolved:
        unpatch_model(model)
    apply_config(model, resolved, generators)
    if strict and not any(settings_of(module) is not None for module in model.modules()):
        report = patch_report(model)
        unpatch_model(model)
        raise NothingPatchedError(
            f"patch_model was asked to patch {type(model).__name__} and found nothing to patch.\n{report}\n"
            "Pass strict=False to go on with the stock model."
        )
    _warn_if_untested(model)
    return model


def apply_config(model: nn.Module, config: CompressionConfig, generators: Generators | None = None) -> None:
    """Patch what is not patched yet. If an error occurs, nothing is changed. It gives no warning and sets no seed.

    Args:
        model: The model to patch in place.
        config: What to patch it with.
        generators: The generators of the stochastic codecs; None: the model's own, or new ones.
    """
    refuse_choice(model, config)
    root = root_of(model)
    generators = generators or (root.generators if root is not None else Generators())
    complete = False
    try:
        with answers_kept():
            patch_new_modules(model, config, "", generators)
        switch_on(model, config.checkpoint)
        install_roots(model, config, patch_new_modules, generators)
        complete = True
    finally:
        if not complete:
            unpatch_model(model)


def patch_new_modules(model: nn.Module, config: CompressionConfig, prefix: str, generators: Generators) -> None:
    """Patch the modules that are not patched yet.

    Args:
        model: The model, or an inner model.
        config: What to patch it with.
        prefix: The name of `model` in the model for which the config gives names.
        generators: The generators of the stochastic codecs.
    """
    _patch_leaves(model, config, prefix, generators)
    if config.plans:
        _install_plans(model, config, prefix)


def _patch_leaves(model: nn.Module, config: CompressionConfig, prefix: str, generators: Generators) -> None:
    places = Places.of(model)
    # a list, because the loop changes the modules' classes
    for name, module in list(model.named_modules(prefix=prefix)):
        if settings_of(module) is not None or is_parametrization(name):
            continue
        if isinstance(module, PatchedModule):
            # it is patched and has no settings: another library made the module by calling the class of a patched layer
            unpatch_instance(module)  # type: ignore[arg-type]
        found = find_site(module, config.at(name), places)
        if isinstance(found, Site):
            codec = found.settings.codec.drawing_from(generators).used_in(name, found.settings.role)
            patch_instance(module, found.mixin, replace(found.settings, codec=codec))


def _install_plans(model: nn.Module, config: CompressionConfig, prefix: str) -> None:
    """Let layers, blocks and modules outside of them run by plans, which they make at their first calls."""
    store, names = store_for_model(), {id(module): name for name, module in model.named_modules(prefix=prefix)}
    units = units_of(model, config.blocks)
    outside = outside_of(model, units)
    roles = {**dict.fromkeys(units, Role.LAYER), **dict.fromkeys(outside, Role.MODULE)}
    for layer, role in roles.items():
        settings = settings_of(layer)
        kept = settings if isinstance(settings, CheckpointSettings) else None
        if settings is not None and (kept is None or kept.role != Role.CHECKPOINT_INPUT):
            continue
        found = find_plans(layer, store, config.at(names[id(layer)]), kept, role)
        if found is not None:
            if kept is not None:
                unpatch_instance(layer)
            patch_instance(layer, found.mixin, found.settings)
            found.settings.plans.note(layer)  # type: ignore[attr-defined]


def _warn_if_lossy(config: CompressionConfig) -> None:
    if not config.lossless:
        name = preset_of(config)
        which = "this config" if name == CUSTOM else f'preset "{name}"'
        _say_once(f"{which} is lossy; fidelity_report(model, batch) measures what it does to the gradients")


def _warn_if_untested(model: nn.Module) -> None:
    """One line about the versions, once, and what they may be the reason for. It is once per kind of model then."""
    found = [f"{name} {version_of(name)} is {how}" for name in ("torch", "transformers") if (how := untested(name))]
    if not found:
        return
    lost = patch_report(model).fall_backs()
    if lost:
        rest = [f"{len(lost) - _TOLD} more reasons"] if len(lost) > _TOLD else []
        reasons = "; ".join([*lost[:_TOLD], *rest])
        found.append(f"left to their own code in {type(model).__name__}: {reasons}; see patch_report(model)")
    _say_once("; ".join(found))


@cache
def _say_once(line: str) -> None:
    logger.warning("%s", line)


def _check_names(model: nn.Module, config: CompressionConfig) -> None:
    """Raise UnknownOptionError for a name in a config that no module has."""
    for block in config.blocks:
        if not blocks_named(model, (block,)):
            raise UnknownOptionError("block", block, [name for name, _ in model.named_children()])
    names = [f".{name}." for name, _ in model.named_modules()]
    for part, _, _ in config.overrides:
        if not any(f".{part}." in name for name in names):
            raise UnknownOptionError("module of an override", part, [name for name, _ in model.named_children()])


_WRAPPERS = {"DataParallel", "DeepSpeedEngine", "DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel"}


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"patch_model takes a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        kinds = {cls.__name__ for cls in type(module).__mro__}
        if kinds & _WRAPPERS:
            raise UnsupportedModelError(
                f"{name or 'the model'} is already wrapped ({type(module).__name__}); call patch_model before "
                "Trainer, accelerator.prepare, DDP or fully_shard"
            )
    meta = next((name for name, p in model.named_parameters() if p.device.type == "meta"), None)
    if meta is not None:
        raise UnsupportedModelError(
            f"parameter {meta!r} is on the meta device; load the weights first, all of them onto devices, and call "
            "patch_model then"
        )


def unpatch_model(model: _Model) -> _Model:
    """Restore every class and forward that `patch_model` changed, in place. A stock model stays as it is."""
    for module in model.modules():
        if isinstance(module, PatchedModule):
            unpatch_instance(module)
        restore_checkpointing(module)
        take_off_hooks(module)
        if is_root(module):
            restore_root(module)
    return model


@contextmanager
def patched(
    model: _Model, config: CompressionConfig | Configured | str = "exact", *, strict: bool = True
) -> Iterator[_Model]:
    """`with patched(model): ...` patches the model; afterwards it is as before (stock, or under its old config)."""
    before = root_of(model)
    try:
        yield patch_model(model, config, strict=strict)
    finally:
        unpatch_model(model)
        if before is not None:
            apply_config(model, before.config, before.generators)
