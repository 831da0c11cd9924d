"""Another package's op for its own module: an autograd Function, a mixin that calls it, and a rule that applies it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from hf_actcompress import CompressionConfig, kept_bytes, patch_model, patch_report
from hf_actcompress.codecs import Codec
from hf_actcompress.codecs.table import CODECS
from hf_actcompress.extension import (
    PatchedModule,
    Role,
    Settings,
    Site,
    applied,
    declare,
    keeps_for_backward,
    load,
    once_differentiable,
    record_of,
    register_rule,
    save,
    stored_exact,
)
from tests.slopes import bert


def scaled_silu(x: Tensor, scale: Tensor) -> Tensor:
    return silu(x) * scale


class ScaledSilu(nn.Module):
    """An activation of another package. Stock keeps its input and, for the next layer, its output."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, features))

    def forward(self, x: Tensor) -> Tensor:
        return scaled_silu(x, self.scale)


class ScaledSiluFunction(torch.autograd.Function):
    """Keeps only x, through a codec. The next layer rebuilds the output instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, codec: Codec) -> Tensor:
        y, records = scaled_silu(x, scale), (record_of(x, codec), stored_exact(scale))
        save(ctx, *records)
        declare(y, scaled_silu, *records)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        x, scale = load(ctx, dy)
        return torch.ops.aten.silu_backward(dy * scale, x), None, None


class ScaledSiluMixin(PatchedModule):
    def forward(self, x: Tensor) -> Tensor:
        settings = self.actcompress
        if settings is None or not keeps_for_backward(x):
            return self.stock_forward()(x)
        return applied(ScaledSiluFunction, x, self.scale, settings.codec)


def scaled_silu_rule(module: nn.Module, config: CompressionConfig) -> Site | None:
    if type(module) is not ScaledSilu:
        return None
    return Site(ScaledSiluMixin, Settings(Role.ACTIVATION, "scaled_silu", CODECS[config.mlp]))


# the loss head's gradients have a smaller error than stock's, so they are not bit-equal
EXACT = CompressionConfig(loss_head=False)


def _model() -> Any:
    torch.manual_seed(0)
    model = bert(2, hidden=64, hidden_dropout_prob=0.0).train()
    for layer in model.bert.encoder.layer:
        layer.intermediate.intermediate_act_fn = ScaledSilu(256)
    return model


def _loss(model: Any) -> Tensor:
    ids = torch.arange(64).view(2, 32)
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def _patched(model: Any, config: Any) -> Any:
    with register_rule(scaled_silu_rule):
        return patch_model(copy.deepcopy(model), config)


def test_values_and_gradients_are_those_of_stock_bit_by_bit() -> None:
    stock = _model()
    patched = _patched(stock, EXACT)
    assert sum(row.module == "ScaledSilu" for row in patch_report(patched).patched) == 2
    losses = _loss(stock), _loss(patched)
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for (name, wanted), found in zip(stock.named_parameters(), patched.parameters(), strict=True):
        assert torch.equal(found.grad, wanted.grad), name


def test_fewer_bytes_are_kept() -> None:
    def kept(model: Any, loss: Callable[[Any], Tensor]) -> int:
        return kept_bytes(lambda: loss(model), "cpu")

    x = torch.randn(2, 32, 64)
    small = nn.Sequential(nn.Linear(64, 256), ScaledSilu(256), nn.Linear(256, 64)).train()
    output = 2 * 32 * 256 * x.itemsize
    bytes_of = [kept(model, lambda model: model(x).sum()) for model in (small, _patched(small, EXACT))]
    assert bytes_of[0] - bytes_of[1] == output

    model = _model()
    # without the rule the package does not patch the module; a plan finds out that the product can be recomputed
    bare = CompressionConfig(loss_head=False, net=False)
    without, netted, exact, int8 = (
        kept(patched, _loss)
        for patched in (
            patch_model(_model(), bare),
            # by a plan, its layers keep less than with any rule
            patch_model(_model(), replace(EXACT)),
            _patched(model, EXACT),
            _patched(model, "int8"),
        )
    )
    # without the module's rule a plan makes the product again, too; with it, layers keep a statistic more
    assert exact <= 1.01 * netted
    assert exact <= 1.01 * without and int8 < exact / 2
