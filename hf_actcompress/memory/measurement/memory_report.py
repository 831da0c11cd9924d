"""`memory_report`: one forward of the stock and one of the patched model, and the bytes that each module keeps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ...config import CompressionConfig, resolve
from ...errors import MeasurementError
from ...models.probe import answers_kept
from ...models.root import root_of
from ...models.rules import find_site
from ...models.sites import Site
from ...patching import patch_model, unpatch_model
from ...roles import Role
from .advice import advise
from .allocator import loss_of
from .compiled import calls_exchanged, compiled_modules, uncompiled, watched
from .report import MemoryReport, MemoryRow
from .restore import patch_restored, training_forward
from .saved_tensors import SavedTensor, SavedTensors, saved_tensors, storages

_CHECKPOINTED = (
    "gradient checkpointing (or another use of saved-tensor hooks) is on: what is kept between forward and backward is "
    "shown, not what the recomputation of one layer keeps for a while"
)


def memory_report(
    model: nn.Module, batch: Mapping[str, Any], config: CompressionConfig | str | None = None
) -> MemoryReport:
    """What is kept for backward, per module and role, stock beside patched. It trains nothing.

    It runs two forwards (a third one to find what the cache costs) and no backward. Afterwards the model's patch,
    modes, buffers, gradients, hooks and the generators are as before. Run it under the autocast context of the
    training. A compiled model, or one with compiled layers, is compiled once more as stock and once as patched, which
    takes as long as its tracing; its figures are those of the graphs that Inductor compiles.

    Args:
        model: Stock or patched, on the device where it trains.
        batch: Keyword arguments of the forward, with labels, of the size that the training uses.
        config: The config of the patched side; by default the model's own, or "exact" for a stock model.

    Returns:
        The report: `.print()`, `.to_json()`, `.plot(path)`, and rows as dataclasses.

    Raises:
        MeasurementError: The forward returned no loss, or the batch is no mapping.
        UnknownOptionError: Unknown preset.
        UnsupportedModelError: A model that `patch_model` refuses.
    """
    root = root_of(model)
    asked = resolve(config) if config is not None else root.config if root is not None else resolve("exact")
    if not isinstance(batch, Mapping):
        raise MeasurementError(
            f"memory_report takes the forward's keyword arguments, as {{'input_ids': ..., 'labels': ...}}, and got a "
            f"{type(batch).__name__}; pass such a batch"
        )
    inputs = dict(batch)
    compiled = compiled_modules(model)
    model = uncompiled(model)
    run = partial(_run, model, compiled, inputs)
    with patch_restored(model), training_forward(model):
        seen = run() if root is not None else None
        before = seen
        if root is None or root.config != asked:
            patch_model(model, asked, strict=False)
            seen = run()
        assert seen is not None
        patched = seen
        unpatch_model(model)
        roles = module_roles(model, asked)
        stock = run()
    # the advice is for the model as the user gave it, which the context above has restored
    with patch_restored(model), training_forward(model):
        advice = advise(model, inputs, before or stock, roles, run)
    return _report(stock, patched, roles, advice)


def _run(model: nn.Module, compiled: list[nn.Module], inputs: dict[str, Any], **options: Any) -> SavedTensors:
    """One forward; the batch's own tensors do not count as kept."""

    def forward() -> Any:
        return model(**{**inputs, **options})

    before = storages(inputs.values())
    if not compiled:
        return saved_tensors(model, forward, loss_of, before)
    with calls_exchanged(compiled), torch.no_grad():
        eager = saved_tensors(model, forward, loss_of, before)
    with watched(model, compiled) as names:
        # the first call traces the graphs, while our saved-tensor hooks are off
        forward()
        inside = {module for outer in compiled for module in outer.modules()}
        found = saved_tensors(
            model, forward, loss_of, before, module_of=names.module_of, left_out=inside - set(compiled)
        )
    return replace(found, tokens=eager.tokens, hidden_size=eager.hidden_size, hidden_from_view=False)


def module_roles(model: nn.Module, config: CompressionConfig) -> dict[str, Role]:
    """The role of every module of a stock model, by name."""
    with answers_kept():
        sites = {name: find_site(module, config) for name, module in model.named_modules()}
    roles = {}
    for name, module in model.named_modules():
        found = sites[name]
        role = found.settings.role if isinstance(found, Site) else getattr(found, "role", None)
        # these two roles belong to a whole layer, and do not say which tensors the layer's own code keeps
        whole = role in (Role.CHECKPOINT_INPUT, Role.TOKENS)
        roles[name] = _role_by_type(name, module) if role is None or whole else role
    return roles


def _role_by_type(name: str, module: nn.Module) -> Role:
    kind = type(module).__name__
    if isinstance(module, nn.Embedding):
        return Role.EMBEDDING
    if "Attention" in kind and not hasattr(module, "config_class"):
        return Role.ATTENTION
    # the outermost module computes the loss
    return Role.LOSS if name == "" or hasattr(module, "loss_function") and "For" in kind else Role.OTHER


def _report(stock: SavedTensors, patched: SavedTensors, roles: dict[str, Role], advice: Any) -> MemoryReport:
    checkpointed = stock.hidden_from_view or patched.hidden_from_view
    rows = _rows(stock, patched, roles, checkpointed)
    layers = tuple(f"{name}." for name in stock.tokens)
    of_layers = [r for r in rows if r.role == Role.CHECKPOINT or f"{r.module}.".startswith(layers)]
    return MemoryReport(
        rows=rows,
        advice=advice,
        notes=(_CHECKPOINTED,) if checkpointed else (),
        layer_tokens=sum(stock.tokens.values()),
        hidden_size=stock.hidden_size,
        layer_stock_bytes=sum(row.stock_bytes for row in of_layers),
        layer_patched_bytes=sum(row.patched_bytes for row in of_layers),
    )


def _rows(
    stock: SavedTensors, patched: SavedTensors, roles: dict[str, Role], checkpointed: bool
) -> tuple[MemoryRow, ...]:
    kept: dict[tuple[str, str], tuple[list[SavedTensor], list[SavedTensor]]] = defaultdict(lambda: ([], []))
    for side, seen in enumerate((stock, patched)):
        for tensor in seen.tensors:
            kept[tensor.module, role_of(tensor, roles, checkpointed)][side].append(tensor)
    order = {name: position for position, name in enumerate(roles)}
    return tuple(
        MemoryRow(module, role, _bytes(a), _bytes(b), tuple(map(str, a)), tuple(map(str, b)))
        for (module, role), (a, b) in sorted(kept.items(), key=lambda item: (order[item[0][0]], item[0][1]))
    )


def _bytes(tensors: list[SavedTensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def role_of(tensor: SavedTensor, roles: dict[str, Role], checkpointed: bool) -> Role:
    role = roles[tensor.module]
    if tensor.call == "dropout" and role != Role.ATTENTION:
        return Role.DROPOUT
    # a checkpointed layer's input is saved outside of the layer, by the module that calls it
    return Role.CHECKPOINT if checkpointed and role == Role.OTHER else role
