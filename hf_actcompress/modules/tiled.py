"""Patched MLPs that compute a tile of rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import compilation, ops
from ..ops import traced_tiles
from ..private_apis import transforms_or_export
from ..records import checkpointed as is_checkpointed
from ..records import current, stock_only
from .base import (
    ModuleMixin,
    PatchedModule,
    Settings,
    has_hooks,
    is_sharded,
    keeps_for_backward,
    only_tensor,
    settings_of,
)

_LORA = "peft.tuners.lora.layer"


# rows of the smallest tile in a checkpointed layer: fewer rows may use a device less well than all rows together
LEAST_ROWS = 8192


def rows_of_tiles(rows: int) -> int:
    """How many rows each tile of a checkpointed layer has; 0: it has too few rows for two tiles."""
    count = rows // LEAST_ROWS
    return -(-rows // count) if count > 1 else 0


def has_many_rows(x: Tensor) -> bool:
    """Whether x [..., H] has rows for several tiles of a checkpointed layer."""
    return x.dim() > 1 and rows_of_tiles(x.numel() // max(1, x.shape[-1])) > 0


@dataclass(frozen=True, kw_only=True)
class TiledSettings(Settings):
    """Settings with the rows of a tile.

    Args:
        tile: How many rows are computed at a time; 0: all.
        checkpointed: Whether a checkpointed layer with many rows has tiles even if `tile` is 0.
        last: The name of the linear layer that makes the output; "" where something else makes it.
    """

    tile: int = 0
    checkpointed: bool = False
    last: str = ""

    def tile_of(self, mlp: nn.Module, rows: int) -> int:
        """How many rows of a call of the MLP are computed at a time; 0: all."""
        if self.tile or not self.checkpointed:
            return self.tile
        tile = rows_of_tiles(rows)
        return tile if tile and is_checkpointed() and not draws(mlp) else 0


def draws(module: nn.Module) -> bool:
    """Whether the module has dropout that is on. Tiles draw other masks than all rows together."""
    return any(isinstance(part, nn.Dropout) and part.p > 0 and part.training for part in module.modules())


def has_tiles(layer: nn.Module) -> bool:
    """Whether an MLP in a layer is always computed in tiles."""
    return any(isinstance(known := settings_of(part), TiledSettings) and known.tile for part in layer.modules())


def tiles_if_checkpointed(layer: nn.Module) -> bool:
    """Whether a layer with many rows computes an MLP in tiles where it is checkpointed."""
    found = ((part, settings_of(part)) for part in layer.modules())
    return any(isinstance(known, TiledSettings) and known.checkpointed and not draws(part) for part, known in found)


class TiledMixin(ModuleMixin):
    """A module that computes each row of its input by itself, in tiles if it was told to."""

    actcompress: TiledSettings | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        settings = self.actcompress
        if settings is None or not (settings.tile or settings.checkpointed):
            return self.whole(*args, **kwargs)
        x = only_tensor(args, kwargs)
        if x is None or x.dim() < 2 or not x.is_floating_point():
            return self.whole(*args, **kwargs)
        if compilation.is_traced():
            return self._as_node(x) if self._is_node() else self.whole(x)
        if not x.numel():
            return self.whole(x)
        tile = settings.tile_of(self, x.numel() // x.shape[-1])
        if not tile or not self._may_be_tiled():
            return self.whole(*args, **kwargs)
        weights = [w for part in self.modules() for w in part._parameters.values()]
        # without gradients there is one reason for tiles: the memory inside of the MLP, if there are several tiles
        inside = current.stock_only or transforms_or_export()
        saves = not torch.is_grad_enabled() and x[..., 0].numel() > tile and not inside
        if not saves and not keeps_for_backward(x, *weights):
            return self.whole(*args, **kwargs)
        own = ops.Snapshot(self, _tile_of)
        if not own.is_closed:
            return self.whole(*args, **kwargs)
        return ops.tiled(x, self.stock_forward(), tile, own, codec=settings.codec)

    def _is_node(self) -> bool:
        """Whether a plan that is traced computes it in tiles."""
        settings = self.actcompress
        assert settings is not None
        if not compilation.is_traced_plan():
            return False
        return settings.tile > 0 or (traced_tiles.in_tiles() and not draws(self))

    def _as_node(self, x: Tensor) -> Tensor:
        assert self.actcompress is not None
        compilation.keep(x, self.actcompress.codec_name)
        return traced_tiles.rows_as_node(self, _TILES, x, draws(self))

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
        """Not with sharded weights, or where hooks would see tiles."""
        return not any(is_sharded(part) or (part is not self and has_hooks(part)) for part in self.modules())


def _tile_of(module: TiledMixin) -> Callable[[Tensor], Tensor]:
    """The code that runs in backward, for its gradients alone."""

    def run(x: Tensor) -> Tensor:
        with stock_only(module.unread()):
            y: Tensor = module.stock_forward()(x)
        return y

    return run


def _rows(module: TiledMixin, rows: int) -> int:
    assert module.actcompress is not None
    return module.actcompress.tile or rows_of_tiles(rows) or max(1, rows)


_TILES = traced_tiles.Tiles(_rows, lambda module: module.stock_forward(), _tile_of)  # type: ignore[arg-type]
