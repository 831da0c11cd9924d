"""Patched modules whose own code runs again in backward while their linear layers do not: see records/selective.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from .. import compilation
from ..ops.autocast import SameAutocast, autocast_dtype
from ..ops.snapshot import Snapshot
from ..records import Forward, current, run_selectively
from .base import ModuleMixin, has_hooks, recording

_DIFFERS = "a second run of its forward did not give what the first gave: it keeps what stock keeps"


def recalled(x: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    """What a linear layer computes from x; in the second run of a module, what the layer returned in the first run."""
    call = None if compilation.is_traced() else current.call
    return compute() if call is None else call.linear(x, compute)


class SelectiveMixin(ModuleMixin):
    """A module with code of its own between its linear layers, such as eager attention or a state-space scan."""

    # (args, kwargs) -> the keywords that a second run gets in place of the first one's; None if it must not run again
    kwargs_again: Callable[..., dict[str, Any] | None]
    # the second run: the stock forward with what `kwargs_again` has returned
    run_again: Callable[..., Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        settings = self.actcompress
        if settings is None or compilation.is_traced():
            return super().forward(*args, **kwargs)
        stock = self.stock_forward()
        if current.net is None:
            return stock(*args, **kwargs)
        x = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.is_floating_point()), None)
        again = self.kwargs_again(args, kwargs)
        hooked = any(part is not self and has_hooks(part) for part in self.modules())
        if x is None or again is None or hooked or not recording(x):
            return stock(*args, **kwargs)
        proved: dict[Any, bool] = self.__dict__.setdefault("actcompress_proved", {})
        kind = (x.dtype, autocast_dtype(x), self.training, *_kinds(args), *kwargs, *_kinds(tuple(kwargs.values())))
        run_again = SameAutocast(Snapshot(self, _second_run_of, weights="none"), x)
        out = run_selectively(Forward(stock, run_again, again, proved, kind), args, kwargs)
        if not settings.note and not all(proved.values()):
            self.__dict__["actcompress"] = replace(settings, note=_DIFFERS)
        return out


def _second_run_of(module: SelectiveMixin) -> Callable[..., Any]:
    return partial(module.run_again, module.stock_forward())


def _kinds(values: tuple[Any, ...]) -> list[str]:
    return [type(value).__name__ for value in values]
