"""`python -m tests.sweep.vision_language`: what LoRA of the language part of vision-language models keeps, real pixels.

The pictures are scikit-learn's handwritten digits, the towers are frozen. The models have random weights and two layers
in each part. Their MLPs are as wide beside their layers as those of SmolVLM-256M, Qwen2.5-VL-7B, Qwen3-VL-8B,
Gemma-3-4B and PaliGemma-3B, and they know so few words that logits are some tenth of stock's bytes, as there.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import peft
import torch
import transformers as hf
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F

from hf_actcompress import kept_bytes, patch_model
from tests.families import Gradients, oracle_step, relative_error, step

from .step import difference, jittered, roughened
from .table import HERE

ROWS, TEXT_TOKENS, SIDE, PATCH, VOCAB, PICTURE = 2, 24, 128, 8, 256, 255
# of the picture's 256 patches four become one token
PICTURE_TOKENS = 64
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TOWER |= {"image_size": SIDE, "patch_size": PATCH}
QWEN_TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "num_heads": 4}
QWEN_TOWER |= {"patch_size": PATCH}
OF_QWEN = {"image_token_id": PICTURE, "video_token_id": 254, "vision_start_token_id": 253, "vision_end_token_id": 252}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}


def _text(wide: int, key_values: int, **more: Any) -> dict[str, Any]:
    """A language part whose MLPs have `wide` channels."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": key_values, "head_dim": 16}
    sizes = {"hidden_size": 64, "intermediate_size": wide, "num_hidden_layers": 2, "vocab_size": VOCAB}
    return {**sizes, **heads, "pad_token_id": 0, **more}


MODELS: dict[str, Callable[[], Any]] = {
    "SmolVLM": lambda: hf.SmolVLMConfig(
        text_config={"model_type": "llama", **_text(171, 2)}, vision_config=TOWER, scale_factor=2,
        image_token_id=PICTURE,
    ),
    "Qwen2.5-VL": lambda: hf.Qwen2_5_VLConfig(
        text_config=_text(338, 1, rope_parameters=ROPE), vision_config={**QWEN_TOWER, "fullatt_block_indexes": [1]},
        **OF_QWEN,
    ),
    "Qwen3-VL": lambda: hf.Qwen3VLConfig(
        text_config=_text(192, 1, rope_parameters=ROPE),
        vision_config={**QWEN_TOWER, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 256}, **OF_QWEN,
    ),
    "Gemma 3": lambda: hf.Gemma3Config(
        text_config=_text(256, 2, sliding_window=32, layer_types=["sliding_attention", "full_attention"]),
        vision_config=TOWER, mm_tokens_per_image=PICTURE_TOKENS, image_token_id=PICTURE, boi_token_id=254,
        eoi_token_id=253,
    ),
    "PaliGemma": lambda: hf.PaliGemmaConfig(
        text_config={"model_type": "gemma", **_text(512, 1)},
        vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER, "patch_size": 16},
        projection_dim=64, image_token_id=PICTURE,
    ),
}  # fmt: skip
TRIALS = 6
WEIGHTS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def digits() -> Tensor:
    """The first digits as grey pictures [ROWS, 3, SIDE, SIDE] with values from -1 to 1."""
    pictures = torch.from_numpy(load_digits().images[:ROWS]).float()[:, None] / 8 - 1
    return F.interpolate(pictures, size=(SIDE, SIDE), mode="bilinear").repeat(1, 3, 1, 1)


def patch_rows(pictures: Tensor) -> Tensor:
    """All patches in one list, as the processors of Qwen give them: by squares of four, a still picture twice."""
    half = SIDE // PATCH // 2
    parts = pictures.view(ROWS, 1, 3, half, 2, PATCH, half, 2, PATCH).expand(-1, 2, -1, -1, -1, -1, -1, -1, -1)
    return parts.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(ROWS * 4 * half * half, 6 * PATCH * PATCH)


def batch_for(name: str) -> dict[str, Any]:
    """Two pictures, each before a text; the loss is that of the text."""
    words = torch.randint(3, 250, (ROWS, TEXT_TOKENS), generator=torch.Generator().manual_seed(0))
    ids = torch.cat((torch.full((ROWS, PICTURE_TOKENS), PICTURE), words), 1)
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids.masked_fill(ids == PICTURE, -100)}
    pictures, seen = digits(), (ids == PICTURE).long()
    if name.startswith("Qwen"):
        grid = torch.tensor([[1, SIDE // PATCH, SIDE // PATCH]] * ROWS)
        return {**batch, "pixel_values": patch_rows(pictures), "image_grid_thw": grid, "mm_token_type_ids": seen}
    if name == "SmolVLM":
        return {**batch, "pixel_values": pictures[:, None], "attention_mask": torch.ones_like(ids)}
    # Gemma 3 has ones for the picture, PaliGemma for the answer, which is here the second half of the text
    answer = (torch.arange(ids.shape[1]) >= PICTURE_TOKENS + TEXT_TOKENS // 2).long().expand_as(ids)
    return {**batch, "pixel_values": pictures, "token_type_ids": seen if name == "Gemma 3" else answer}


def build(name: str, weights: str = "fp32", checkpointing: str = "") -> Any:
    """The model in train mode, frozen but for LoRA on the attention of its language part. Always the same weights.

    With checkpointing "as enabled" the frozen tower is differentiated, too, because `gradient_checkpointing_enable` of
    transformers has the inputs of every part want gradients. With "tower left out" that is undone.
    """
    torch.manual_seed(0)
    # Gemma 3's projection of pictures begins as zeros
    model: Any = roughened(hf.AutoModelForImageTextToText.from_config(MODELS[name]())).to(WEIGHTS[weights])
    model.config.use_cache = False
    targets = r".*\.(text_model|language_model)\..*\.(q_proj|k_proj|v_proj|o_proj)"
    lora = peft.LoraConfig(r=8, target_modules=targets, init_lora_weights=False)
    adapted: Any = peft.get_peft_model(model, lora).train()
    if checkpointing:
        adapted.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if checkpointing == "tower left out":
        model.disable_input_require_grads()
    return adapted


@dataclass
class Run:
    """The gradients of a step, and what a batch keeps."""

    gradients: Gradients
    kept: int


def run(name: str, weights: str, preset: str | None, checkpointing: str = "") -> Run:
    """One step of the stock model, or of a patched one."""
    model, batch = build(name, weights, checkpointing), batch_for(name)
    if preset is not None:
        patch_model(model, preset)
    batch = {k: x.to(WEIGHTS[weights]) if x.is_floating_point() else x for k, x in batch.items()}
    _, gradients = step(model, batch)
    return Run(gradients, kept_bytes(lambda: model(**batch).loss, "cpu"))


def errors(name: str, weights: str) -> tuple[float, float]:
    """Stock's error and exact's against fp64: the root of the mean square over some models with other weights."""
    squares = torch.zeros(2, dtype=torch.float64)
    for trial in range(TRIALS):
        model, batch = jittered(build(name, weights), trial), batch_for(name)
        true, found = oracle_step(model, batch), step(model, batch)[1]
        ours = step(patch_model(model), batch)[1]
        squares += torch.tensor([relative_error(gradients, true) ** 2 for gradients in (found, ours)])
    stock, exact = (squares / TRIALS).sqrt().tolist()
    return stock, exact


def kept_row(name: str, weights: str) -> list[str]:
    """The cells of the first table."""
    stock = run(name, weights, None).kept
    cells = [name, weights, f"{stock / 1024:,.0f}"]
    cells += [f"{run(name, weights, preset).kept / stock:.0%}" for preset in ("exact", "int8")]
    for how in ("as enabled", "tower left out"):
        low = run(name, weights, None, how).kept
        cells += [f"{low / 1024:,.0f}", f"{run(name, weights, 'exact', how).kept / low:.0%}"]
    return cells


def gradients_row(name: str, weights: str) -> list[str]:
    """The cells of the second table."""
    stock, exact = (run(name, weights, preset).gradients for preset in (None, "exact"))
    figures = [difference(exact, stock)]
    for how in ("as enabled", "tower left out"):
        low, both = (run(name, weights, preset, how).gradients for preset in (None, "exact"))
        figures.append(difference(both, low))
    figures += errors(name, weights)
    return [name, weights, *(f"{x:.1e}" if x else "0" for x in figures)]


VERSIONS = f"torch {torch.__version__}, transformers {hf.__version__}"
INTRODUCTION = f"""# Vision-language models: LoRA behind a frozen tower

`python -m tests.sweep.vision_language`, {VERSIONS}, train mode. Each of {ROWS} rows has a handwritten
digit in {PICTURE_TOKENS} tokens and {TEXT_TOKENS} tokens of text. The models are tiny, with random weights;
their MLPs have the proportions of SmolVLM-256M, Qwen2.5-VL-7B, Qwen3-VL-8B, Gemma-3-4B and PaliGemma-3B. LoRA of rank 8
in fp32 is on the attention of the language part alone; all else is frozen.

Shares are of what stock keeps in the same setting. Gradient checkpointing, as transformers enables it, differentiates
a frozen tower, too, and keeps its layers' inputs (`tests/UPSTREAM.md`). "Tower left out" is after
`model.disable_input_require_grads()`, which changes no gradient.

"""
KEPT = ["model", "frozen weights", "stock, KiB", "exact", "int8", "checkpointed: stock, KiB", "exact"]
KEPT += ["tower left out: stock, KiB", "exact"]
GRADIENTS = ["model", "frozen weights", "exact", "checkpointed", "checkpointed, tower left out"]
GRADIENTS += ["stock against fp64", "exact against fp64"]


def lines(head: list[str], rows: list[list[str]]) -> str:
    """A table of Markdown."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *rows))


def main() -> int:
    """Write `vision_language.md`."""
    argparse.ArgumentParser(prog="python -m tests.sweep.vision_language", description=__doc__).parse_args()
    hf.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    every = [(name, weights) for weights in WEIGHTS for name in MODELS]
    text = INTRODUCTION + lines(KEPT, [kept_row(*one) for one in every])
    text += "\nThe relative error of all gradients against stock's in the same setting (0: the same bits), and against "
    text += f"fp64,\nthis over {TRIALS} models with weights that differ by some percent.\n\n"
    text += lines(GRADIENTS, [gradients_row(*one) for one in every])
    (HERE / "vision_language.md").write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
