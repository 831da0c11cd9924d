"""Measurements that leave a model unchanged: classes, forwards, modes, buffers and random states are restored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ...models.root import PatchedForward
from ...reference.rng import codecs_undisturbed

_PATCH_KEYS = (
    "forward",
    "actcompress",
    "actcompress_root",
    "actcompress_checkpointing",
    "gradient_checkpointing",
    "_gradient_checkpointing_func",
)


@contextmanager
def patch_restored(model: nn.Module) -> Iterator[None]:
    """However the block patches or unpatches the model, afterwards each object is what it was before."""
    modules = [
        (module, type(module), {key: module.__dict__[key] for key in _PATCH_KEYS if key in module.__dict__})
        for module in model.modules()
    ]
    roots = [(root, dict(vars(root))) for root in _roots(model)]
    try:
        yield
    finally:
        for module, cls, attributes in modules:
            if type(module) is not cls:
                module.__class__ = cls
            for key in _PATCH_KEYS:
                module.__dict__.pop(key, None)
            module.__dict__.update(attributes)
        for root, state in roots:
            vars(root).update(state)


def _roots(model: nn.Module) -> list[PatchedForward]:
    found = (module.__dict__.get("actcompress_root") for module in model.modules())
    return [root for root in found if isinstance(root, PatchedForward)]


def forked_generators(model: nn.Module) -> AbstractContextManager[None]:
    """The block changes neither torch's generator nor those of the model's CUDA devices."""
    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
    return torch.random.fork_rng(devices=list(devices))


@contextmanager
def draws_restored(model: nn.Module) -> Iterator[None]:
    """Draws of stochastic codecs in the block change neither the model's generators nor those of the process."""
    of_model = {id(root.generators): root.generators for root in _roots(model)}
    with ExitStack() as stack:
        stack.enter_context(codecs_undisturbed())
        for generators in of_model.values():
            stack.enter_context(generators.undisturbed())
        yield


@contextmanager
def training_forward(model: nn.Module) -> Iterator[None]:
    """The block runs in train mode with gradients; afterwards modes, buffers and generators are restored."""
    modes = [(module, module.training) for module in model.modules()]
    buffers: list[tuple[Any, Any]] = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with forked_generators(model), draws_restored(model), torch.enable_grad():
            model.train()
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                # sparse tensors have no `equal`
                if buffer.layout is not torch.strided or not torch.equal(buffer, before):
                    buffer.copy_(before)
