"""Patched MLPs that compute a tile of rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..private_apis import transforms_or_export
from ..records import current, stock_only
from .base import ModuleMixin, PatchedModule, Settings, has_hooks, is_sharded, keeps_for_backward, only_tensor

_LORA = "peft.tuners.lora.layer"


@dataclass(frozen=True, kw_only=True)
class TiledSettings(Settings):
    """Also how many rows are computed at a time (0: all), and the name of the linear layer that makes the output.

    `last` is "" where something else makes the output.
    """

    tile: int = 0
    last: str = ""


class TiledMixin(ModuleMixin):
    """A module that computes each row of its input by itself, in tiles if it was told to."""

    actcompress: TiledSettings | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        settings = self.actcompress
        if settings is None or not settings.tile:
            return self.whole(*args, **kwargs)
        x = only_tensor(args, kwargs)
        if x is None or x.dim() < 2 or not x.numel() or not x.is_floating_point() or not self._may_be_tiled():
            return self.whole(*args, **kwargs)
        weights = [w for part in self.modules() for w in part._parameters.values()]
        # without gradients there is one reason for tiles: the memory inside of the MLP, if there are several tiles
        inside = current.stock_only or transforms_or_export()
        saves = not torch.is_grad_enabled() and x[..., 0].numel() > settings.tile and not inside
        if not saves and not keeps_for_backward(x, *weights):
            return self.whole(*args, **kwargs)
        own = ops.Snapshot(self, _tile_of)
        if not own.is_closed:
            return self.whole(*args, **kwargs)
        return ops.tiled(x, self.stock_forward(), settings.tile, own, codec=settings.codec)

    def whole(self, *args: Any, **kwargs: Any) -> Any:
        """All rows at once."""
        return self.stock_forward()(*args, **kwargs)

    def unread(self) -> nn.Module | None:
        """The layer on whose output no gradient depends: the last one, or the base layer in it if it is plain LoRA."""
        assert self.actcompress is not None
        last: Any = self._modules.get(self.actcompress.last)
        if isinstance(last, PatchedModule) and last.stock_class.__module__ == _LORA:
            # other forms of LoRA multiply with the base layer's output
            return last.base_layer if not last.lora_variant else None  # type: ignore[attr-defined, no-any-return]
        return last  # type: ignore[no-any-return]

    def _may_be_tiled(self) -> bool:
        """Not under a compiler, in a module that runs again, with sharded weights, or where hooks would see tiles."""
        if torch.compiler.is_compiling() or current.call is not None:
            return False
        return not any(is_sharded(part) or (part is not self and has_hooks(part)) for part in self.modules())


def _tile_of(module: TiledMixin) -> Callable[[Tensor], Tensor]:
    """The code that runs in backward, for its gradients alone."""

    def run(x: Tensor) -> Tensor:
        with stock_only(module.unread()):
            y: Tensor = module.stock_forward()(x)
        return y

    return run
