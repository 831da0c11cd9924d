"""A model that cannot be patched raises a clear error; a module that is left alone is listed with a reason."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import cpu_offload, dispatch_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_actcompress import CompressionConfig, patch_model, patch_report
from hf_actcompress.errors import NothingPatchedError, UnknownOptionError, UnsupportedModelError
from hf_actcompress.modules.base import PatchedModule
from tests.families import BODY, BY_NAME, differing, step

LLAMA = BY_NAME["llama"]


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_unknown_preset_lists_the_known() -> None:
    with pytest.raises(UnknownOptionError, match="unknown preset 'exakt'; known: .*'exact'"):
        patch_model(LLAMA.build(), "exakt")


def test_unknown_codec_lists_the_known() -> None:
    with pytest.raises(UnknownOptionError, match="codec for mlp 'int5'; known: .*'identity'"):
        CompressionConfig(mlp="int5")


def test_a_value_that_does_not_go_with_another_option() -> None:
    with pytest.raises(UnknownOptionError, match="^with tokens < 1, drop_padding cannot be True; allowed: False$"):
        CompressionConfig(tokens=0.5, drop_padding=True)


def test_unknown_option() -> None:
    with pytest.raises(UnknownOptionError, match="unknown option 'nlp'; known: .*'mlp'"):
        CompressionConfig.from_preset("exact", nlp="identity")
    with pytest.raises(TypeError, match="nlp"):
        CompressionConfig(nlp="identity")  # type: ignore[call-arg]


@pytest.mark.parametrize("config", [None, 3, {"mlp": "identity"}])
def test_a_config_of_another_type(config: Any) -> None:
    with pytest.raises(UnknownOptionError, match="CompressionConfig"):
        patch_model(LLAMA.build(), config)


@pytest.mark.parametrize("thing", [LLAMA.model, {}, None])
def test_not_a_module(thing: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=type(thing).__name__):
        patch_model(thing)


def test_meta_device() -> None:
    with torch.device("meta"):
        model = LLAMA.build()
    with pytest.raises(UnsupportedModelError, match="embed_tokens.*meta device.*load the weights"):
        patch_model(model)
    assert not any(isinstance(m, PatchedModule) for m in model.modules())


def test_wrapped_by_ddp(one_rank: None) -> None:
    model = nn.parallel.DistributedDataParallel(LLAMA.build())
    with pytest.raises(UnsupportedModelError, match="DistributedDataParallel.*before"):
        patch_model(model)


def test_sharded_by_fsdp2(one_rank: None) -> None:
    model = LLAMA.build()
    fully_shard(model.model.layers[0], mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(UnsupportedModelError, match=r"layers\.0.*FSDP.*before"):
        patch_model(model)


def _reasons(model: nn.Module) -> dict[str, str]:
    return {row.name: row.reason for row in patch_report(model).left_alone}


def _bound_forwards(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if n and "forward" in m.__dict__ and list(m.parameters(recurse=False))]


def test_dispatched_with_disk_offload(tmp_path: Path) -> None:
    """With device_map, accelerate leaves the weights that are on disk on the meta device: the model is refused."""
    model = LLAMA.build()
    device_map = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
    device_map |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    dispatch_model(model, device_map, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    with pytest.raises(UnsupportedModelError, match=r"layers\.1.*meta device"):
        patch_model(model)


def test_dispatched_on_one_device(tmp_path: Path) -> None:
    stock, model = LLAMA.build(), LLAMA.build()
    devices = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    dispatch_model(model, {**devices, "lm_head": "cpu"}, main_device="cpu", force_hooks=True)
    bound = _bound_forwards(model)
    assert "model.layers.0.mlp.gate_proj" in bound
    patch_model(model, strict=False)
    reasons = _reasons(model)
    for name in bound:
        if name != "model.embed_tokens":
            assert "already bound on the instance" in reasons[name], name
    loss, grads = step(model, LLAMA.make_batch("right"))
    stock_loss, expected = step(stock, LLAMA.make_batch("right"))
    assert torch.equal(loss, stock_loss) and grads.keys() == expected.keys()


def test_cpu_offload() -> None:
    model = LLAMA.build()
    cpu_offload(model, execution_device="cpu")
    with pytest.raises(UnsupportedModelError, match="meta device"):
        patch_model(model)


def test_forward_bound_on_the_instance() -> None:
    """Liger and hub kernels bind a forward on the instance. A patched class would have no effect on such a module."""
    model, stock = LLAMA.build(), LLAMA.build()
    for m in (model, stock):
        for layer in m.model.layers:
            layer.mlp.forward = types.MethodType(_doubled_mlp, layer.mlp)
            layer.input_layernorm.forward = types.MethodType(_shifted_norm, layer.input_layernorm)
    patch_model(model, BODY)
    reasons = _reasons(model)
    for name in ("model.layers.0.mlp", "model.layers.1.input_layernorm"):
        assert "already bound on the instance" in reasons[name]
    assert "model.layers.1.post_attention_layernorm" not in reasons
    loss, grads = step(model, LLAMA.make_batch("right"))
    stock_loss, expected = step(stock, LLAMA.make_batch("right"))
    assert torch.equal(loss, stock_loss) and grads.keys() == expected.keys()


def _doubled_mlp(self: Any, x: Tensor) -> Tensor:
    out: Tensor = 2 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return out


def _shifted_norm(self: Any, x: Tensor) -> Tensor:
    return x * self.weight + 0.5


class Linear8bit(nn.Linear):
    """As in bitsandbytes, the weight is int8, so it cannot be multiplied with without its scale."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.scale = float(linear.weight.detach().abs().max()) / 127
        codes = (linear.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(codes, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


def _quantised() -> Any:
    model = LLAMA.build()
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.mlp, name, Linear8bit(getattr(layer.mlp, name)))
    return model


def test_quantised_linears_are_left_alone_and_called() -> None:
    model, stock = patch_model(_quantised(), BODY), _quantised()
    mlp = model.model.layers[0].mlp
    assert type(mlp.gate_proj) is Linear8bit and isinstance(mlp, PatchedModule)
    assert "Linear8bit is a subclass" in _reasons(model)["model.layers.0.mlp.gate_proj"]
    loss, grads = step(model, LLAMA.make_batch("right"))
    stock_loss, expected = step(stock, LLAMA.make_batch("right"))
    assert torch.equal(loss, stock_loss) and grads.keys() == expected.keys()


@pytest.mark.parametrize("lora_first", [False, True])
def test_lora_on_quantised_linears(lora_first: bool) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["gate_proj", "up_proj", "down_proj"], init_lora_weights=False)

    def lora(model: Any) -> Any:
        torch.manual_seed(2)
        return get_peft_model(model.to(torch.bfloat16), config)

    stock = lora(_quantised())
    model = patch_model(lora(_quantised()), BODY) if lora_first else lora(patch_model(_quantised(), BODY))
    loss, grads = step(model, LLAMA.make_batch("right"))
    stock_loss, expected = step(stock, LLAMA.make_batch("right"))
    assert torch.equal(loss, stock_loss) and len(expected) == 2 * 3 * 2
    assert not differing(grads, expected)


def test_a_subclass_with_its_own_weights_is_listed() -> None:
    """Modules such as PReLU are known and not patched, and the report says why."""
    model = nn.Sequential(nn.Linear(4, 4), nn.PReLU(), nn.Dropout(0.1, inplace=True), nn.ReLU(inplace=True))
    patch_model(model)
    reasons = _reasons(model)
    assert "parameters of its own" in reasons["1"]
    assert "in place" in reasons["2"] and "in place" in reasons["3"]
    with pytest.raises(NothingPatchedError, match="parameters of its own"):
        patch_model(nn.Sequential(nn.PReLU()))
