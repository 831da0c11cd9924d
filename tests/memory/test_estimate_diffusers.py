"""Estimates of models of diffusers, compared with the CPU allocator's events of the real step."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_actcompress import kept_bytes, patch_model
from hf_actcompress.errors import ModelConfigError, UnknownOptionError
from hf_actcompress.memory import estimate, max_batch_size, plan
from hf_actcompress.memory.estimation.random_model import local_model

diffusers = pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")

from tests.integration.diffusers_models import HEADS, MODELS, build, noise  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
logging.getLogger("diffusers").setLevel(logging.ERROR)
# what the batches of `diffusers_models` are the latents of
SIDE = {"height": 256, "width": 256}
SIZES: dict[str, dict[str, int]] = {
    "flux": {**SIDE, "text_tokens": 32}, "sd3": {**SIDE, "text_tokens": 32}, "unet": {**SIDE, "text_tokens": 16},
    "wan": {**SIDE, "frames": 5, "text_tokens": 16},
    "ltx": {"height": 512, "width": 512, "frames": 9, "text_tokens": 16},
}  # fmt: skip
# preset, LoRA, gradient checkpointing
SETUPS = {
    "stock": (None, False, False), "checkpointing": (None, False, True), "exact": ("exact", False, False),
    "exact, LoRA": ("exact", True, False), "exact, LoRA, checkpointing": ("exact", True, True),
}  # fmt: skip
NUMBERS = ("hidden_states", "encoder_hidden_states", "pooled_projections", "sample")


def real(model: Any, batch: dict[str, Any], preset: str | None, lora: bool, checkpointing: bool) -> int:
    """The bytes that a step keeps, by the allocator."""
    if lora:
        model.requires_grad_(False)
        model.add_adapter(peft.LoraConfig(r=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    if checkpointing:
        model.enable_gradient_checkpointing()
    batch = {name: x.to(model.dtype) if name in NUMBERS else x for name, x in batch.items()}
    with torch.no_grad():
        target = torch.zeros_like(model(**batch, return_dict=False)[0])
    if preset is not None:
        patch_model(model, preset)

    def loss() -> Tensor:
        return (model(**batch, return_dict=False)[0].float() - target.float()).square().mean()  # type: ignore[no-any-return]

    loss().backward()
    return kept_bytes(loss, "cpu")


def check(name: str, setup: str, dtype: torch.dtype, folder: Path) -> None:
    """The estimate of a saved model agrees with a step of the model that diffusers loads from there."""
    model, batch = build(name)
    model.save_pretrained(folder)
    loaded = type(model).from_pretrained(folder, torch_dtype=dtype).train()
    preset, lora, checkpointing = SETUPS[setup]
    options: dict[str, Any] = {"lora": lora, "gradient_checkpointing": checkpointing, **SIZES[name]}
    found = estimate(str(folder), batch_size=2, config=preset, dtype=dtype, device="cpu", **options)
    assert found.model == type(model).__name__ and sum(found.kept_by_role.values()) == found.kept_bytes
    weights = [*loaded.parameters(), *loaded.buffers()]
    assert lora or found.weights_bytes == sum(x.nbytes for x in weights)
    assert found.kept_bytes == pytest.approx(real(loaded, batch, preset, lora, checkpointing), rel=0.01)


@pytest.mark.daily(3)
@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("name", MODELS)
def test_fp32(name: str, setup: str, tmp_path: Path) -> None:
    check(name, setup, torch.float32, tmp_path)


@pytest.mark.daily(3)
@pytest.mark.parametrize("setup", ["stock", "checkpointing", "exact", "exact, LoRA"])
@pytest.mark.parametrize("name", MODELS)
def test_bf16(name: str, setup: str, tmp_path: Path) -> None:
    """diffusers leaves parts of Wan's weights in fp32."""
    check(name, setup, torch.bfloat16, tmp_path)


@pytest.mark.parametrize("setup", ["stock", pytest.param("exact", marks=pytest.mark.daily(3))])
def test_many_blocks_are_computed_from_few(setup: str) -> None:
    sizes = {"in_channels": 16, "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 6, 6)}
    model = diffusers.FluxTransformer2DModel(num_layers=6, num_single_layers=7, **HEADS, **sizes).train()
    _, batch = MODELS["flux"]()
    preset, lora, _ = SETUPS[setup]
    found = estimate(model, batch_size=2, config=preset, lora=lora, device="cpu", **SIZES["flux"])
    assert found.layers == 13 and found.kept_per_layer > 0
    assert found.kept_bytes == pytest.approx(real(model, batch, preset, lora, False), rel=0.01)


def changed(name: str, **more: Any) -> tuple[Any, dict[str, Any]]:
    """The model with these changes of its config, and the batch of the one without."""
    model, batch = MODELS[name]()
    config = {field: value for field, value in model.config.items() if not field.startswith("_")}
    return type(model)(**{**config, **more}).train(), batch


def test_more_inputs_of_unets_and_of_pictures_to_videos() -> None:
    """As SDXL and Wan's models of pictures to videos have them."""
    more = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8}
    unet, batch = changed("unet", **more, projection_class_embeddings_input_dim=6 * 8 + 24)
    batch["added_cond_kwargs"] = {"text_embeds": noise(2, 24), "time_ids": noise(2, 6)}
    found = estimate(unet, batch_size=2, config=None, device="cpu", **SIZES["unet"])
    assert found.kept_bytes == pytest.approx(real(unet, batch, None, False, False), rel=0.01)
    wan, batch = changed("wan", image_dim=24, added_kv_proj_dim=64)
    batch["encoder_hidden_states_image"] = noise(2, 257, 24)
    found = estimate(wan, batch_size=2, config=None, device="cpu", **SIZES["wan"])
    assert found.kept_bytes == pytest.approx(real(wan, batch, None, False, False), rel=0.01)


@pytest.mark.daily(2)
def test_flux_at_full_size_from_its_class_alone() -> None:
    found = estimate({"_class_name": "FluxTransformer2DModel"}, batch_size=1, config=None, lora=True, dtype="bfloat16")
    assert found.seq_len == 4096 and found.layers == 57 and "4,096" in found.notes[0]
    assert found.weights_bytes == pytest.approx(2 * 11.9e9, rel=0.01)
    # 512 tokens of the caption and 4,096 of the picture, of 3,072 numbers: a block keeps some of these tensors
    assert 10 < found.kept_per_layer / (4608 * 3072 * 2) < 20


def test_the_largest_batch_of_pictures() -> None:
    model, _ = MODELS["sd3"]()
    by_one = estimate(model, batch_size=1, config=None, device="cpu", **SIZES["sd3"])
    # ten batches, and not eleven
    budget = by_one.state_bytes + int(10.5 * by_one.step_peak_bytes)
    found = max_batch_size(model, budget=budget, config=None, device="cpu", **SIZES["sd3"])
    assert found in (10, 11)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no multiple": ({"height": 250}, "height=250 is no multiple of 16, .*; the nearest is 240"),
    "frames of a picture": ({"frames": 4}, "one frame; got frames=4"),
    "a length": ({"seq_len": 16}, "seq_len is of models of transformers"),
    "compiled": ({"engine": "compile"}, 'engine="compile" is not estimated'),
    "quantised": ({"quantization": "nf4"}, "quantization is not estimated"),
    "sharded": ({"fsdp": 2}, "fsdp is not estimated"),
    "no LoRA": ({"lora": peft.LoraConfig(target_modules=["nope"])}, "peft puts no LoRA on a FluxTransformer2DModel"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    options, said = REFUSED[case]
    with pytest.raises(ModelConfigError, match=said):
        estimate(MODELS["flux"]()[0], batch_size=1, **options)


def test_what_a_config_may_not_be() -> None:
    (flux, _), stated = MODELS["flux"](), {"_class_name": "FluxTransformer2DModel"}
    with pytest.raises(ModelConfigError, match="known: FluxTransformer2DModel, SD3"):
        estimate({"_class_name": "PixArtTransformer2DModel"}, batch_size=1)
    with pytest.raises(ModelConfigError, match="FluxTransformer2DModel cannot be made from this config"):
        estimate({**stated, "num_layers": "two"}, batch_size=1)
    with pytest.raises(ModelConfigError, match="frames=80 is no multiple of 4, plus 1, .*; the nearest is 77"):
        estimate({"_class_name": "WanTransformer3DModel"}, batch_size=1, frames=80)
    with pytest.raises(ModelConfigError, match="the forward of SD3Transformer2DModel fails: ValueError: Height"):
        estimate(MODELS["sd3"]()[0], batch_size=1, height=1024)
    with pytest.raises(ModelConfigError, match="no inputs for a UNet2DConditionModel with num_class_embeds"):
        estimate(changed("unet", num_class_embeds=3)[0], batch_size=1, **SIDE)
    with pytest.raises(UnknownOptionError, match="unknown preset"):
        estimate(flux, batch_size=1, config="exat")
    for other in (lambda: plan(flux, batch_size=1, seq_len=4, budget="8GB"), lambda: local_model(stated)):
        with pytest.raises(ModelConfigError, match="is of diffusers, whose models `estimate` takes"):
            other()


def test_a_model_of_transformers_has_no_pictures() -> None:
    path = "recipes/configs/llama-1b.json"
    with pytest.raises(ModelConfigError, match="height is of the pictures"):
        estimate(path, batch_size=1, seq_len=4, height=64)
    with pytest.raises(ModelConfigError, match="seq_len is missing"):
        estimate(path, batch_size=1)


def test_a_pipeline_of_a_wan_with_wide_latents(tmp_path: Path) -> None:
    """Wan 2.2's smallest model has latents of 16 pixels; a pipeline's folder has its model in another one."""
    wide, _ = changed("wan", in_channels=48, out_channels=48)
    wide.save_config(tmp_path / "transformer")
    (tmp_path / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    assert estimate(str(tmp_path), batch_size=1, config=None, height=64, width=32, frames=9).seq_len == 2 * 1 * 3
