"""What FSDP2 (`fully_shard`) has made of a module."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def _fsdp_module() -> Any:
    """Its class; None before something has imported it, because no module is of that class then."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return None if fsdp is None else fsdp.FSDPModule


def wrapped_class(module: nn.Module) -> type[nn.Module]:
    """The class of the module, or of what it was before `fully_shard` gave it a subclass of its class."""
    kind, fsdp = type(module), _fsdp_module()
    return kind.__bases__[-1] if fsdp is not None and fsdp in kind.__bases__ else kind


def is_hook_of_fsdp(hook: Any) -> bool:
    """Whether `fully_shard` has registered this hook of a module."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


def stays_whole(module: nn.Module) -> bool:
    """Whether the module's weights stay in memory from forward to backward, if `fully_shard` was called for it."""
    fsdp = _fsdp_module()
    if fsdp is None or not isinstance(module, fsdp):
        return True
    group = module._get_fsdp_state()._fsdp_param_group  # type: ignore[operator, union-attr]
    return group is None or group.post_forward_mesh_info is None
