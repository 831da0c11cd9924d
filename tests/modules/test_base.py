"""The class swap itself, and the conditions under which a patched module runs its stock forward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.errors import UnsupportedModelError
from hf_actcompress.modules.base import (
    Settings,
    has_hooks,
    is_sharded,
    keeps_for_backward,
    patch_instance,
    patched_class,
    settings_of,
    unpatch_instance,
)
from hf_actcompress.modules.leaves import LayerNormMixin, LinearMixin
from tests.families import BY_NAME


def test_one_class_per_mixin_and_type() -> None:
    assert patched_class(LinearMixin, nn.Linear) is patched_class(LinearMixin, nn.Linear)
    assert patched_class(LayerNormMixin, nn.LayerNorm).__name__ == "ActCompressLayerNorm"


def test_swap_and_back() -> None:
    layer = nn.Linear(3, 2)
    before = dict(layer.__dict__)
    patch_instance(layer, LinearMixin, Settings("linear"))
    assert isinstance(layer, nn.Linear) and type(layer) is not nn.Linear
    unpatch_instance(layer)
    assert type(layer) is nn.Linear and layer.__dict__.keys() == before.keys()


@pytest.mark.parametrize(
    "config", [CompressionConfig(checkpoint_input="int8_outliers"), CompressionConfig.from_preset("long")]
)
@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_a_mixin_gets_settings_of_its_own_type(name: str, config: CompressionConfig) -> None:
    model = patch_model(BY_NAME[name].build(), config)
    patched = [module for module in model.modules() if settings_of(module) is not None]
    for module in patched:
        said = (vars(cls).get("__annotations__", {}).get("actcompress") for cls in type(module).__mro__)
        assert type(settings_of(module)).__name__ == next(filter(None, said)).split(" | ")[0], type(module)
    assert len({type(settings_of(module)) for module in patched}) > 2


def test_keeps_for_backward() -> None:
    x, w = torch.ones(2), nn.Parameter(torch.ones(2))
    assert keeps_for_backward(x, w) and not keeps_for_backward(x, None)
    with torch.no_grad():
        assert not keeps_for_backward(x, w)
    assert torch.func.grad(lambda w: w.sum() * (2.0 if keeps_for_backward(w) else 1.0))(x).tolist() == [1.0, 1.0]


def test_hooks_are_seen() -> None:
    layer = nn.Linear(3, 2)
    assert not has_hooks(layer)
    handle = layer.register_full_backward_pre_hook(lambda *_: None)
    assert has_hooks(layer)
    handle.remove()
    assert not has_hooks(layer)


def test_sharded_by_zero3() -> None:
    layer = nn.LayerNorm(3)
    assert not is_sharded(layer)
    layer.weight.ds_id = 0  # type: ignore[attr-defined]
    assert is_sharded(layer)


def test_data_parallel_is_refused() -> None:
    """A replica copies the attributes of the instance. With a bound forward among them it would run the original."""
    model = patch_model(nn.Sequential(nn.Linear(3, 2)))
    with pytest.raises(UnsupportedModelError, match="torchrun"):
        model[0]._replicate_for_data_parallel()


def test_a_checkpointed_region_sees_the_hooks_of_its_first_run() -> None:
    module, other, seen = nn.Linear(2, 2), nn.Linear(2, 2), []

    def region(x: Tensor) -> Tensor:
        seen.append((has_hooks(module), has_hooks(other)))
        return other(module(x)).exp()

    handle = module.register_forward_hook(lambda *_: None)
    y = checkpoint(region, torch.ones(2, requires_grad=True), use_reentrant=False)
    handle.remove()
    other.register_forward_hook(lambda *_: None)
    y.sum().backward()
    assert seen == [(True, False)] * 2
    assert (has_hooks(module), has_hooks(other)) == (False, True)
