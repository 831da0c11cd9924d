"""Patched copies of a model on fake tensors. Steps run on them; a copy may serve several batches."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from itertools import chain

from torch import nn

from ....codecs import Codec, Offload
from ....codecs.table import CODECS
from ....config import CompressionConfig
from ....layers import plans_shared
from ....models.checkpointing import below, checkpointable
from ....models.probe import answers_kept
from ....models.root import name_default_loss
from ....models.rules import mlps_for_tiles
from ....patching import apply_config, unpatch_model
from ....private_apis import FakeTensorMode
from ....roles import Role
from ...measurement.memory_report import module_roles
from ..meta_device import ONE_AT_A_TIME
from ..meta_model import empty_like
from .fake_allocator import FakeAllocator
from .setting import Setting
from .stand_ins import counted_checkpoints


@dataclass(frozen=True)
class Ready:
    """A copy of a model that is ready for a step, the FakeTensorMode of its tensors, and the role of each module by
    name, if these were asked for.
    """

    model: nn.Module
    mode: FakeTensorMode
    roles: dict[str, Role]


def ready(model: nn.Module, setting: Setting, *, roles: bool) -> Ready:
    """Copy and patch a model on the meta device under a setting; the setting's batch does not matter."""
    mode, fake = fake_copy(model, setting)
    # probes run on real tensors; if they need the values of weights, they get the answers for a new model
    with ONE_AT_A_TIME, FakeAllocator(), answers_kept(setting.answers), plans_shared(setting.plans):
        names = module_roles(fake, setting.config or CompressionConfig()) if roles else {}
        if setting.config is not None:
            apply_config(fake, _present(setting.config, fake))
    if setting.compiled:
        # with this, a compiled stock model has as many graphs as the patched one that it is compared with
        name_default_loss(fake)
    else:
        counted_checkpoints(fake, cuda=setting.cuda)
    return Ready(fake, mode, names)


def mlps_of(ready: Ready, setting: Setting) -> list[nn.Module]:
    """The MLPs of an unpatched copy that may be computed in tiles."""
    # probes, as in `ready`
    with ONE_AT_A_TIME, FakeAllocator(), answers_kept(setting.answers):
        return mlps_for_tiles(ready.model)


def is_reusable(setting: Setting) -> bool:
    """Whether a step leaves its copy unchanged: nothing is sharded or traced, and no codec learns in training."""
    config = setting.config or CompressionConfig()
    codecs = map(CODECS.__getitem__, config.codecs)
    found = [codec.inner if isinstance(codec, Offload) else codec for codec in codecs]
    learns = any(type(codec).used_in is not Codec.used_in for codec in found)
    return setting.ranks == 1 and not setting.compiled and not learns


def fake_copy(model: nn.Module, setting: Setting) -> tuple[FakeTensorMode, nn.Module]:
    """A FakeTensorMode, and a stock copy of the model on its fake tensors."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    if not setting.compiled:
        # `OpCalls` remembers what ops return, so torch's own cache would only do the same work again
        mode.cache_enabled = False
    with mode, FakeAllocator(results=setting.ops):
        fakes = {id(x): empty_like(x, "cpu") for x in chain(model.parameters(), model.buffers())}
    fake = copy.deepcopy(model, fakes)
    unpatch_model(fake)
    return mode, fake


def _present(config: CompressionConfig, model: nn.Module) -> CompressionConfig:
    """The config without checkpoints of layers that the shortened model does not have, and without `share_prompts`,
    because no two sequences of a fake batch are known to begin alike.
    """
    layers = checkpointable(model)
    parts = (part for part in config.checkpoint if any(below(name, part) for name in layers))
    return replace(config, checkpoint=tuple(parts), share_prompts=False)
