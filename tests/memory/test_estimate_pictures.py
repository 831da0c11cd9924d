"""Estimates of vision-language models, with a picture in each sequence, against the allocator's events."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from hf_actcompress import estimate, kept_bytes, measure_step, patch_model
from hf_actcompress.errors import ModelConfigError
from hf_actcompress.memory.estimation.fake_step.pictures import pictures
from hf_actcompress.memory.estimation.meta_model import skeleton
from hf_actcompress.models.adapters import with_lora

ROWS, TOKENS, PICTURE = 2, 320, 999
TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 4096,
}  # fmt: skip
TOWER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 56,
    "patch_size": 14,
}  # fmt: skip
CLIP = {"model_type": "clip_vision_model", "projection_dim": 32, **TOWER}
LLAMA, QWEN = {"model_type": "llama", **TEXT}, {"model_type": "qwen2", **TEXT}
ROTARY = {**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
QWEN_TOWER = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "num_heads": 4, "patch_size": 14,
}  # fmt: skip
OF_QWEN = {
    "image_token_id": PICTURE, "video_token_id": 998, "vision_start_token_id": 997, "vision_end_token_id": 996,
}  # fmt: skip

CONFIGS = {
    "llava": lambda: hf.LlavaConfig(text_config=LLAMA, vision_config=CLIP, image_token_id=PICTURE),
    "llava-next": lambda: hf.LlavaNextConfig(
        text_config=LLAMA, vision_config=CLIP, image_token_index=PICTURE, image_grid_pinpoints=[[56, 56], [56, 112]]
    ),
    "paligemma": lambda: hf.PaliGemmaConfig(
        text_config={"model_type": "gemma", "head_dim": 16, **TEXT},
        vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, "projection_dim": 64, **TOWER},
        projection_dim=64,
        image_token_id=PICTURE,
    ),
    "gemma3": lambda: hf.Gemma3Config(
        text_config={"head_dim": 16, **TEXT}, vision_config=TOWER, mm_tokens_per_image=4, image_token_id=PICTURE,
        boi_token_id=998, eoi_token_id=997,
    ),
    "internvl": lambda: hf.InternVLConfig(
        text_config=QWEN, vision_config={**TOWER, "image_size": [56, 56], "patch_size": [14, 14]},
        image_token_id=PICTURE, downsample_ratio=0.5,
    ),
    "qwen2-vl": lambda: hf.Qwen2VLConfig(
        text_config=ROTARY, vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4}, **OF_QWEN
    ),
    "qwen2.5-vl": lambda: hf.Qwen2_5_VLConfig(text_config=ROTARY, vision_config=QWEN_TOWER, **OF_QWEN),
    "qwen3-vl": lambda: hf.Qwen3VLConfig(
        text_config={**ROTARY, "head_dim": 16},
        vision_config={**QWEN_TOWER, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
        **OF_QWEN,
    ),
    "mllama": lambda: hf.MllamaConfig(
        text_config={"cross_attention_layers": [1], "pad_token_id": 0, **TEXT},
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_global_layers": 1,
            "attention_heads": 4, "image_size": 56, "max_num_tiles": 2, "vision_output_dim": 64,
            "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]], "intermediate_layers_indices": [0],
        },
        image_token_index=PICTURE,
    ),
}  # fmt: skip


def _batch(model: Any) -> dict[str, torch.Tensor]:
    """A batch with real values in the shapes that the estimate uses, and a placeholder for each token of a picture."""
    batch = pictures(model, ROWS, TOKENS)
    ids = torch.randint(0, 900, (ROWS, TOKENS))
    for name, x in batch.items():
        if x.is_floating_point():
            batch[name] = torch.randn_like(x)
        elif name == "position_ids":
            batch[name] = torch.arange(TOKENS).expand(3, ROWS, TOKENS).contiguous()
        elif name not in ("image_grid_thw", "image_sizes"):
            batch[name] = torch.zeros_like(x) if "token_type" in name else torch.ones_like(x)
    if hasattr(model.model, "get_image_features"):
        wanted = ("pixel_values", "image_grid_thw", "image_sizes")
        with torch.no_grad():
            found = model.model.get_image_features(**{k: x for k, x in batch.items() if k in wanted})
        found = getattr(found, "pooler_output", found)
        rows = sum(x.numel() // x.size(-1) for x in (found if isinstance(found, (tuple, list)) else (found,)))
        for name, x in {"ids": ids, **batch}.items():
            if name == "ids" or "token_type" in name:
                x[:, : rows // ROWS] = PICTURE if name == "ids" else 1
    return {"input_ids": ids, "labels": ids.clone(), **batch}


def _check(config: Any, preset: str | None, lora: int | None = None) -> None:
    model: Any = type(skeleton(config, torch.float32, None, False))._from_config(config).train()
    model.config.use_cache = False
    batch = _batch(model)
    if lora is not None:
        model = with_lora(model, lora).train()
    if preset is not None:
        patch_model(model, preset)

    def step() -> None:
        model(**batch).loss.backward()

    step()
    found = estimate(config, batch_size=ROWS, seq_len=TOKENS, config=preset, device="cpu", lora=lora)
    assert found.kept_bytes == pytest.approx(kept_bytes(lambda: model(**batch), "cpu"), rel=0.01)
    assert found.step_peak_bytes == pytest.approx(measure_step(step, "cpu").peak_bytes, rel=0.05)
    assert "a picture of" in str(found) and "patches" in str(found)


@pytest.mark.daily(4)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("preset", [None, "exact"])
def test_kept_bytes_and_peak(name: str, preset: str | None) -> None:
    _check(CONFIGS[name](), preset)


@pytest.mark.daily(3)
@pytest.mark.parametrize("lora", [None, 4])
@pytest.mark.parametrize("name", ["llava", "qwen2-vl"])
def test_deeper_ones(name: str, lora: int | None) -> None:
    """Some towers return the output of a layer that is counted from the end; all layers of such a tower are run."""
    config = CONFIGS[name]()
    config.text_config.num_hidden_layers = 7
    config.text_config.layer_types = ["full_attention"] * 7
    config.vision_config.num_hidden_layers = config.vision_config.depth = 6
    _check(config, "exact", lora)


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ModelConfigError, match="the pictures become 512 tokens, and the batch has 128"):
        estimate(CONFIGS["qwen2-vl"](), batch_size=2, seq_len=64)
    idefics = hf.Idefics3Config(text_config=LLAMA, vision_config=TOWER, scale_factor=2, image_token_id=PICTURE)
    with pytest.raises(ModelConfigError, match="Idefics3ForConditionalGeneration reads values of its pictures"):
        estimate(idefics, batch_size=2, seq_len=64)


def test_labels_of_another_length() -> None:
    """An encoder-decoder whose labels are shorter keeps less; the figures are the allocator's."""
    config = hf.T5Config(
        d_model=64, d_ff=128, num_layers=2, num_heads=4, d_kv=16, vocab_size=1000, decoder_start_token_id=0
    )
    model: Any = hf.T5ForConditionalGeneration(config).train()
    model.config.use_cache = False
    batch = {"input_ids": torch.randint(0, 900, (4, 128)), "labels": torch.randint(0, 900, (4, 32))}
    patch_model(model)
    model(**batch).loss.backward()
    found = estimate(config, batch_size=4, seq_len=128, target_len=32, device="cpu")
    assert found.kept_bytes == pytest.approx(kept_bytes(lambda: model(**batch), "cpu"), rel=0.01)
    assert found.kept_bytes < 0.8 * estimate(config, batch_size=4, seq_len=128, device="cpu").kept_bytes
    with pytest.raises(ModelConfigError, match="no decoder"):
        estimate(hf.GPT2Config(n_layer=2), batch_size=1, seq_len=8, target_len=8)
