"""patch_model and its inverse: find the sites of a model, swap their classes, report what was done."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from typing import TypeVar

from torch import nn

from .codecs import CODECS
from .config import PRESETS, CompressionConfig, Configured, resolve
from .errors import NothingPatchedError, NotPatchedError, UnknownOptionError, UnsupportedModelError
from .models import Declined, Site, find_site
from .models.checkpointing import find_checkpoint_input, restore_checkpointing, switch_on
from .models.heads import find_head, output_layers
from .models.padding import why_not
from .models.root import install_root, is_root, restore_root, root_module, root_of
from .modules.base import PatchedModule, patch_instance, unpatch_instance
from .reference import seed_codecs

logger = logging.getLogger(__name__)
_Model = TypeVar("_Model", bound=nn.Module)


@dataclass(frozen=True)
class PatchRow:
    """One module: what it became and keeps, or why it was left alone (`reason`).

    `note` says why a patched module keeps something else than the config asks for.
    """

    name: str
    module: str
    role: str
    variant: str = ""
    codec: str = ""
    keeps: str = ""
    reason: str = ""
    note: str = ""


@dataclass(frozen=True)
class PatchReport:
    """Every module that a rule knows. Prints with rich (`print()`), serialises (`to_json()`)."""

    rows: tuple[PatchRow, ...]

    @property
    def patched(self) -> tuple[PatchRow, ...]:
        return tuple(row for row in self.rows if not row.reason)

    @property
    def left_alone(self) -> tuple[PatchRow, ...]:
        return tuple(row for row in self.rows if row.reason)

    def to_json(self) -> str:
        return json.dumps([asdict(row) for row in self.rows], indent=2)

    def __str__(self) -> str:
        roles = Counter(row.role for row in self.patched)
        patched = ", ".join(f"{count} {role}" for role, count in sorted(roles.items())) or "nothing"
        lines = [f"patched: {patched}"]
        for (role, note), count in Counter((row.role, row.note) for row in self.patched if row.note).items():
            lines.append(f"otherwise than asked: {count} {role}: {note}")
        for (role, reason), count in Counter((row.role, row.reason) for row in self.left_alone).items():
            lines.append(f"left alone: {count} {role}: {reason}")
        return "\n".join(lines)

    def print(self) -> None:
        """A table of all modules on the console."""
        from rich.console import Console
        from rich.table import Table

        columns = ("module", "type", "role", "variant", "codec", "keeps", "left alone or otherwise because")
        table = Table(*columns, title="hf_actcompress")
        for row in self.rows:
            reason = row.reason or row.note
            table.add_row(row.name, row.module, row.role, row.variant, row.codec, row.keeps, reason)
        Console().print(table)


def patch_model(
    model: _Model,
    config: CompressionConfig | Configured | str = "exact",
    *,
    strict: bool = True,
    seed: int | None = None,
) -> _Model:
    """Make a model keep fewer bytes between forward and backward. In place; call it before Trainer or `prepare`.

    Args:
        model: A transformers model, bare or wrapped by PEFT (before or after `get_peft_model`), or any module that
            holds one. Not on the meta device, not wrapped by DDP or FSDP.
        config: A preset's name, a CompressionConfig, or what carries one (a plan, a calibration). The default keeps
            gradients exact.
        strict: Raise if nothing could be patched.
        seed: Of what stochastic codecs draw; by default torch's initial seed. Dropout is not affected.

    Returns:
        The same model. A second call with the same config patches what is new in the model; with another config it
        starts again from the stock classes.

    Saves:
        See `memory_report(model, batch)`; state_dict, save_pretrained, generate and eval are those of the stock model.

    Raises:
        NothingPatchedError: strict, and no module was patched.
        UnknownOptionError: Unknown preset or codec, an override or a layer to checkpoint that is not there.
        UnsupportedModelError: Wrapped by DDP or FSDP, on the meta device, or not a module.
    """
    resolved = resolve(config)
    _check(model)
    if seed is not None or root_of(model) is None:
        seed_codecs(seed)
    _check_overrides(model, resolved)
    _warn_if_lossy(resolved)
    if any(isinstance(m, PatchedModule) for m in model.modules()) and _config_of(model) != resolved:
        unpatch_model(model)
    report = apply_config(model, resolved)
    if strict and not report.patched:
        unpatch_model(model)
        raise NothingPatchedError(
            f"patch_model was asked to patch {type(model).__name__} and found nothing to patch.\n{report}\n"
            "Pass strict=False to go on with the stock model."
        )
    return model


def apply_config(model: nn.Module, config: CompressionConfig) -> PatchReport:
    """Patch what is not patched yet: all of it, or nothing if something goes wrong. Says nothing and seeds nothing."""
    complete = False
    try:
        report = PatchReport(tuple(_patch_modules(model, config)))
        install_root(model, config, report.rows, apply_config)
        complete = True
        return report
    finally:
        if not complete:
            unpatch_model(model)


def _warn_if_lossy(config: CompressionConfig) -> None:
    if not config.lossless:
        _say_once(next((f'preset "{name}"' for name, preset in PRESETS.items() if preset == config), "this config"))


@cache
def _say_once(name: str) -> None:
    logger.warning("%s is lossy; fidelity_report(model, batch) measures what it does to the gradients", name)


def _check_overrides(model: nn.Module, config: CompressionConfig) -> None:
    names = [f".{name}." for name, _ in model.named_modules()]
    for part, _, _ in config.overrides:
        if not any(f".{part}." in name for name in names):
            raise UnknownOptionError("module of an override", part, [name for name, _ in model.named_children()])


_WRAPPERS = {
    "DataParallel",
    "DeepSpeedEngine",
    "DistributedDataParallel",
    "FSDPModule",
    "FullyShardedDataParallel",
    "OptimizedModule",
}


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"patch_model takes a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        kinds = {cls.__name__ for cls in type(module).__mro__}
        compiled = getattr(module, "_compiled_call_impl", None) is not None
        if kinds & _WRAPPERS or compiled:
            raise UnsupportedModelError(
                f"{name or 'the model'} is already wrapped ({type(module).__name__}); call patch_model before "
                "Trainer, accelerator.prepare, DDP, fully_shard or torch.compile"
            )
    meta = next((name for name, p in model.named_parameters() if p.device.type == "meta"), None)
    if meta is not None:
        raise UnsupportedModelError(
            f"parameter {meta!r} is on the meta device; load the weights first, all of them onto devices, and call "
            "patch_model then"
        )


def _patch_modules(model: nn.Module, config: CompressionConfig) -> Iterator[PatchRow]:
    if config.drop_padding and (reason := why_not(root_module(model))):
        yield PatchRow("", type(root_module(model)).__name__, "padding", reason=reason)
    heads = output_layers(root_module(model))
    root = root_of(model)
    # a declined head is a linear layer all the same: it has two rows, and the first is known from the first time
    before = [row for row in (root.rows if root is not None else ()) if row.role == "loss_head" and row.reason]
    for name, module in model.named_modules():
        if isinstance(module, PatchedModule):
            yield from (row for row in before if f".{name}".endswith(f".{row.name}"))
            yield _row(name, module)
            continue
        found = find_head(module, config.at(name)) if any(module is head for head in heads) else None
        if isinstance(found, Declined):
            yield PatchRow(name, type(module).__name__, found.role, reason=found.reason)
        if not isinstance(found, Site):
            found = find_checkpoint_input(module, config.at(name)) or find_site(module, config.at(name))
        if isinstance(found, Declined):
            yield PatchRow(name, type(module).__name__, found.role, reason=found.reason)
        elif isinstance(found, Site):
            patch_instance(module, found.mixin, found.settings)
            assert isinstance(module, PatchedModule)
            yield _row(name, module)
    for name, module in switch_on(model, config.checkpoint):
        yield PatchRow(name, type(module).__name__, "checkpoint", "layer", keeps="input")


def _row(name: str, module: PatchedModule) -> PatchRow:
    settings = module.actcompress
    codec = next(name for name, codec in CODECS.items() if codec == settings.codec)
    stock = module.stock_class.__name__
    return PatchRow(name, stock, settings.role, settings.variant, codec, settings.keeps, note=settings.note)


def _config_of(model: nn.Module) -> CompressionConfig | None:
    root = root_of(model)
    return root.config if root is not None else None


def unpatch_model(model: _Model) -> _Model:
    """Restore every class and forward that `patch_model` changed, in place. Harmless on a stock model."""
    for module in model.modules():
        if isinstance(module, PatchedModule):
            unpatch_instance(module)
        restore_checkpointing(module)
        if is_root(module):
            restore_root(module)
    return model


@contextmanager
def patched(
    model: _Model, config: CompressionConfig | Configured | str = "exact", *, strict: bool = True
) -> Iterator[_Model]:
    """`with patched(model): ...`: patched inside, and afterwards as it was before (stock, or under its old config)."""
    before = _config_of(model)
    try:
        yield patch_model(model, config, strict=strict)
    finally:
        unpatch_model(model)
        if before is not None:
            patch_model(model, before, strict=False)


def patch_report(model: nn.Module) -> PatchReport:
    """What was patched, and what was left alone and why. Raises NotPatchedError for a stock model."""
    root = root_of(model)
    if root is None:
        raise NotPatchedError(f"{type(model).__name__} is not patched; call patch_model(model) first")
    return PatchReport(tuple(root.rows))
