"""TRL's trainers with a patched model against the same trainers with the stock model, from the same seeds."""

from __future__ import annotations

import argparse
import collections
import difflib
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from hf_actcompress import PRESETS, CompressionConfig, patch_model
from hf_actcompress.memory.measurement.allocator import allocator_events, collected
from hf_actcompress.models import rows_left_out
from tests.layers.plans import calls
from tests.oracle import held_bytes

datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.daily(5)]

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<user>", "<assistant>"]
# what a user says, and what the assistant answers: only the latter is trained with `assistant_only_loss`
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<assistant> "
    "{% generation %}{{ m['content'] }} </s>{% endgeneration %}"
    "{% else %}<user> {{ m['content'] }} </s> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
STEPS = 3
# relative to the L2 norm of the changes by training. Sums in another order than stock's differ by about 1e-7 for each
# step in fp32; under autocast one rounding of bf16 is 4e-3.
TOLERANCES = {"fp32": 1e-4, "autocast": 5e-2}


@cache
def _lines() -> tuple[str, ...]:
    """English sentences from docstrings of the standard library."""
    texts = " ".join((m.__doc__ or "") for m in (argparse, collections.OrderedDict, difflib, textwrap.TextWrapper))
    words = texts.split()
    return tuple(" ".join(words[i : i + 6 + i % 7]) for i in range(0, 48 * 7, 7))


@cache
def _tokenizer() -> Any:
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator(_lines(), trainers.WordLevelTrainer(special_tokens=SPECIAL))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        chat_template=TEMPLATE,
    )  # fmt: skip


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _texts() -> Any:
    return datasets.Dataset.from_dict({"text": list(_lines())})


def _long_texts() -> Any:
    """Texts of 50 to 600 words, some of which do not fit into a row."""
    text = " ".join(_lines() * 5).split()
    return datasets.Dataset.from_dict({"text": [" ".join(text[i : i + n]) for i, n in enumerate((600, 50, 300, 450))]})


def _chats() -> Any:
    pairs = zip(_lines()[::2], _lines()[1::2], strict=True)
    return datasets.Dataset.from_dict({"messages": [[_turn("user", a), _turn("assistant", b)] for a, b in pairs]})


def _preferences() -> Any:
    lines = _lines()
    rows = [
        {"prompt": a, "chosen": b, "rejected": c}
        for a, b, c in zip(lines[0::3], lines[1::3], lines[2::3], strict=False)
    ]
    return datasets.Dataset.from_list(rows)


def _prompts() -> Any:
    return datasets.Dataset.from_dict({"prompt": list(_lines())})


def _labelled() -> Any:
    pairs = zip(_lines()[::2], _lines()[1::2], strict=True)
    return datasets.Dataset.from_list(
        [{"prompt": a, "completion": b, "label": i % 2 == 0} for i, (a, b) in enumerate(pairs)]
    )


def _reward(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs between completions; its meaning does not matter."""
    return [float(sum(map(ord, text)) % 17) for text in completions]


@dataclass(frozen=True)
class Recipe:
    """One row: a trainer, its options and its data."""

    name: str
    trainer: str
    config: str
    data: Callable[[], Any]
    options: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def task(self) -> str:
        return "SEQ_CLS" if self.trainer == "RewardTrainer" else "CAUSAL_LM"


def _sft(name: str, data: Callable[[], Any] = _texts, **options: Any) -> Recipe:
    return Recipe(f"sft {name}".strip(), "SFTTrainer", "SFTConfig", data, {"max_length": 32, **options})


_GENERATION = {
    "num_generations": 2, "max_completion_length": 6, "per_device_train_batch_size": 4, "temperature": 0.7,
}  # fmt: skip
RECIPES: tuple[Recipe, ...] = (
    _sft(""),
    _sft("packing", packing=True),
    _sft("packing bfd_split", _long_texts, packing=True, packing_strategy="bfd_split"),
    _sft("packing wrapped", packing=True, packing_strategy="wrapped"),
    _sft("padding free", padding_free=True, max_length=None),
    _sft("assistant only", _chats, assistant_only_loss=True),
    _sft("accumulation", gradient_accumulation_steps=2),
    Recipe("dpo", "DPOTrainer", "DPOConfig", _preferences, {"max_length": 32}),
    Recipe("kto", "KTOTrainer", "KTOConfig", _labelled, {"max_length": 32, "per_device_train_batch_size": 4}),
    Recipe("grpo", "GRPOTrainer", "GRPOConfig", _prompts, _GENERATION, {"reward_funcs": _reward}),
    Recipe(
        "grpo with reference", "GRPOTrainer", "GRPOConfig", _prompts, {**_GENERATION, "beta": 0.1},
        {"reward_funcs": _reward},
    ),
    Recipe("rloo", "RLOOTrainer", "RLOOConfig", _prompts, _GENERATION, {"reward_funcs": _reward}),
    Recipe("reward", "RewardTrainer", "RewardConfig", _preferences, {"max_length": 32}),
)  # fmt: skip
BY_RECIPE = {recipe.name: recipe for recipe in RECIPES}


def _model(recipe: Recipe, folder: Path, **sizes: Any) -> Any:
    """A model that was loaded from a folder: TRL loads the reference model of DPO from there too."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": len(_tokenizer()), "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "num_labels": 1,
            "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0, **sizes,
        }
    )  # fmt: skip
    cls = "LlamaForSequenceClassification" if recipe.task == "SEQ_CLS" else "LlamaForCausalLM"
    getattr(transformers, cls)(config).save_pretrained(folder / "base")
    return getattr(transformers, cls).from_pretrained(folder / "base")


def _trainer(recipe: Recipe, model: Any, folder: Path, peft_config: Any = None, **options: Any) -> Any:
    # plain gradient descent: Adam's first steps are of the same size whatever the gradient's size, so that a rounding
    # error in a gradient near zero would become a whole step
    defaults = {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 2, "report_to": [],
        "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "logging_steps": 1, "save_strategy": "no",
        "seed": 5, "learning_rate": 0.1, "lr_scheduler_type": "constant", "optim": "sgd", "disable_tqdm": True,
    }  # fmt: skip
    args = getattr(trl, recipe.config)(**{**defaults, **recipe.options, **options})
    return getattr(trl, recipe.trainer)(
        model=model, args=args, train_dataset=recipe.data(), processing_class=_tokenizer(), peft_config=peft_config,
        **recipe.extra,
    )  # fmt: skip


def _lora(recipe: Recipe) -> Any:
    return peft.LoraConfig(task_type=recipe.task, r=4, target_modules="all-linear", init_lora_weights=False)


def _trained(
    recipe: Recipe, folder: Path, *, patched: CompressionConfig | None, adapters: bool, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses, and the change of each trained weight."""
    model = _model(recipe, folder)
    if patched is not None:
        patch_model(model, patched)
    torch.manual_seed(1)
    trainer = _trainer(recipe, model, folder, _lora(recipe) if adapters else None, **options)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    assert patched is None or all(calls(trainer.model))
    after = {n: p.detach().float() for n, p in trainer.model.named_parameters() if p.requires_grad}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: after[name] - before[name].float() for name in before}


def _assert_same_training(
    recipe: Recipe,
    folder: Path,
    mode: str,
    adapters: bool,
    config: CompressionConfig = PRESETS["exact"],
    **options: Any,
) -> None:
    options["bf16"] = mode == "autocast"
    stock_losses, stock = _trained(recipe, folder / "stock", patched=None, adapters=adapters, **options)
    losses, ours = _trained(recipe, folder / "ours", patched=config, adapters=adapters, **options)
    assert len(losses) == STEPS and stock.keys() == ours.keys()
    size = sum(float(x.square().sum()) for x in stock.values()) ** 0.5
    assert size > 0
    error = sum(float((ours[n] - x).square().sum()) for n, x in stock.items()) ** 0.5
    assert error / size < TOLERANCES[mode], f"weights: {error / size:.1e}"
    assert losses == pytest.approx(stock_losses, rel=TOLERANCES[mode], abs=TOLERANCES[mode])


recipes = pytest.mark.parametrize("name", BY_RECIPE)


@recipes
@pytest.mark.parametrize("adapters", [False, True], ids=["", "peft_config"])
def test_trains_as_stock(name: str, adapters: bool, tmp_path: Path) -> None:
    _assert_same_training(BY_RECIPE[name], tmp_path, "fp32", adapters)


@pytest.mark.parametrize("name", ["sft", "dpo", "grpo", "reward"])
@pytest.mark.parametrize("adapters", [False, True], ids=["", "peft_config"])
def test_trains_as_stock_with_the_defaults_of_trl(name: str, adapters: bool, tmp_path: Path) -> None:
    """TRL's defaults are bf16 autocast and gradient checkpointing."""
    _assert_same_training(BY_RECIPE[name], tmp_path, "autocast", adapters, gradient_checkpointing=True)


@pytest.mark.parametrize("name", ["dpo", "grpo"])
@pytest.mark.parametrize("adapters", [False, True], ids=["", "peft_config"])
def test_prompts_of_a_group_are_kept_once(
    name: str, adapters: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, real = [], rows_left_out.repeated_rows_of
    monkeypatch.setattr(rows_left_out, "repeated_rows_of", lambda *tokens: found.append(real(*tokens)) or found[-1])
    config = CompressionConfig(share_prompts=True)
    _assert_same_training(BY_RECIPE[name], tmp_path, "fp32", adapters, config)
    assert sum(copies is not None for copies in found) >= STEPS


@pytest.mark.parametrize("name", ["sft packing", "sft packing bfd_split", "sft padding free"])
def test_packed_rows_make_nothing_of_all_tokens_by_all_tokens(name: str, tmp_path: Path) -> None:
    """The largest allocation of the model without its head is compared: TRL's own head makes tiles of any size."""
    recipe = replace(BY_RECIPE[name], data=_long_texts)
    model = _model(recipe, tmp_path, max_position_embeddings=1024)
    trainer = _trainer(recipe, model, tmp_path, **({"max_length": 400} if "packing" in name else {}))
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    tokens, blocks = batch["input_ids"].shape[1], []
    assert batch["input_ids"].shape[0] == 1 and tokens > 500 and "attention_mask" not in batch
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    for patched in (False, True):
        if patched:
            patch_model(model)
        with collected(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            model.model(**inputs, use_cache=False).last_hidden_state.sum().backward()
        blocks.append(max(size for _, _, size in allocator_events(profiler)[0]))
    assert blocks[1] < tokens**2 <= blocks[0]


def _kept_share(recipe: Recipe, folder: Path) -> float:
    """Bytes that one loss keeps for backward, ours over stock's, with LoRA made by the trainer."""
    kept = []
    for patched in (False, True):
        # wide enough that activations take more bytes than what does not grow with the model
        model = _model(
            recipe, folder / str(patched), hidden_size=128, intermediate_size=448, num_hidden_layers=4
        ).bfloat16()
        if patched:
            patch_model(model)
        trainer = _trainer(recipe, model, folder / str(patched), _lora(recipe), per_device_train_batch_size=4)
        batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
        trainer.model.train()

        def loss(trainer: Any = trainer, batch: Any = batch) -> Tensor:
            result: Tensor = trainer.compute_loss(trainer.model, dict(batch))
            return result

        # the first call patches the adapters and fills caches
        loss().backward()
        kept.append(held_bytes(loss))
    return kept[1] / kept[0]


@pytest.mark.parametrize(("name", "goal"), [("sft", 0.45), ("dpo", 0.62)])
def test_kept_bytes_with_peft_config(name: str, goal: float, tmp_path: Path) -> None:
    """TRL's fused head calls the inner model and not the outermost forward. The savings must be the same even so."""
    assert _kept_share(BY_RECIPE[name], tmp_path) <= goal
