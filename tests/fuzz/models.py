"""The two sides of a case, stock and ours, and the oracle: models with the same weights, and their batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_actcompress import CompressionConfig, patch_model
from tests.families import VOCAB, Batch
from tests.fuzz.case import Case
from tests.fuzz.families import EAGER_ONLY, FUZZED

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]
# PEFT refuses the layers whose weights Mamba hands to a kernel, and dropout and second adapters on experts
LORA_TARGETS: dict[str, list[str]] = {"mamba": ["in_proj", "x_proj"]}
NO_LORA_ELSEWHERE = {("mixtral", "dropout"): _PROJECTIONS, ("mixtral", "two"): _PROJECTIONS}
SIDES = ("stock", "ours", "oracle")
# the length of the labels of T5 and BART, whatever the length of the source
TARGET_LENGTH = 5


def weight_dtype(case: Case) -> torch.dtype:
    """The dtype of the base model's weights."""
    return DTYPES.get(case.mode, torch.float32)


def config_of(case: Case) -> CompressionConfig:
    """The config that the case's model is patched with."""
    return CompressionConfig.from_preset(
        case.preset,
        drop_padding=case.drop_padding,
        loss_head=case.loss_head,
        logits=case.keep_logits,
        plans=case.plans,
    )


def build(case: Case, side: str, index: int = 0, prepare: Callable[[Any], None] = lambda model: None) -> Any:
    """The model of one side. The `index`-th model of a case has weights of its own, the same on every side.

    `prepare` puts on what is neither stock's nor ours (hooks).
    """
    family = FUZZED[case.family]
    options: dict[str, Any] = {} if case.family in EAGER_ONLY else {"attn_implementation": case.attention}
    if case.cache:
        options["use_cache"] = True
    model = family.build(weight_dtype(case), dropout=case.dropout, seed=case.seed + index, **options)
    _put_special_value(model, case)
    if side == "ours" and case.patch_first:
        patch_model(model, config_of(case))
    if case.lora != "none":
        model = _with_lora(model, case)
    if case.checkpointing != "none" and side != "oracle":
        model.gradient_checkpointing_enable({"use_reentrant": case.checkpointing == "reentrant"})
        if case.lora != "none":
            model.enable_input_require_grads()
    prepare(model)
    if side == "ours" and not case.patch_first:
        patch_model(model, config_of(case))
    return _oracle_of(model) if side == "oracle" else model


def _oracle_of(model: Any) -> Any:
    """The same model in fp64. Its experts run in eager mode, because grouped products do not exist in fp64."""
    for module in model.modules():
        if hasattr(module, "set_experts_implementation"):
            module.set_experts_implementation("eager")
            break
    return model.double()


def _with_lora(model: Any, case: Case) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(case.seed + 1)
    targets = NO_LORA_ELSEWHERE.get((case.family, case.lora)) or LORA_TARGETS.get(case.family, "all-linear")
    rate = {"dropout": 0.3, "two": case.dropout}.get(case.lora, 0.0)
    lora = LoraConfig(r=3, target_modules=targets, init_lora_weights=False, lora_dropout=rate)
    adapted = get_peft_model(model, lora)
    if case.lora == "two":
        targets = [name.removesuffix(".lora_A") for name, _ in model.named_modules() if name.endswith(".lora_A")]
        adapted.add_adapter("other", LoraConfig(r=5, target_modules=targets[::2], init_lora_weights=False))
    return adapted


def _put_special_value(model: nn.Module, case: Case) -> None:
    """Put NaN or inf into one element of one weight, or make one matrix so large that fp16 overflows."""
    if not case.special.endswith("-weight"):
        return
    generator = torch.Generator().manual_seed(case.seed)
    weights = [p for p in model.parameters() if case.special != "large-weight" or p.dim() == 2]
    weight = weights[int(torch.randint(len(weights), (), generator=generator))].data
    if case.special == "large-weight":
        weight.mul_(500.0)
        return
    element = int(torch.randint(weight.numel(), (), generator=generator))
    weight.view(-1)[element] = {"nan": float("nan"), "inf": float("inf")}[case.special.removesuffix("-weight")]


def batch_of(case: Case, side: str, index: int = 0) -> Batch:
    """A batch; floating-point inputs are of the weights' dtype, on the oracle's side the same values in fp64."""
    generator = torch.Generator().manual_seed(case.seed + 100 * index)
    task = FUZZED[case.family].task
    batch = _images(case, generator) if task == "image" else _texts(case, generator)
    _put_special_input(batch, case)
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            value = value.to(weight_dtype(case))
            batch[name] = value.double() if side == "oracle" else value
            batch[name].requires_grad_(case.embeds)
    if case.hidden:
        batch["output_hidden_states"] = True
    if case.between == "loss-attentions":
        batch["output_attentions"] = True
    return batch


def _images(case: Case, generator: torch.Generator) -> Batch:
    batch: Batch = {"pixel_values": torch.randn(case.batch, 3, 16, 16, generator=generator)}
    labels = torch.randint(0, 2, (case.batch,), generator=generator)
    if case.labels != "none":
        batch["labels"] = labels.fill_(-100) if case.labels == "empty" else labels
    return batch


def _texts(case: Case, generator: torch.Generator) -> Batch:
    b, s, task = case.batch, case.length, FUZZED[case.family].task
    ids = torch.randint(3, VOCAB, (b, s), generator=generator)
    embeds = torch.randn(b, s, 32, generator=generator)
    batch: Batch = {"inputs_embeds": embeds} if case.embeds else {"input_ids": ids}
    mask = attention_mask(case, generator)
    if case.padding != "none":
        batch["attention_mask"] = mask
    labels = ids.masked_fill(mask == 0, -100)
    if task == "causal":
        # padding tokens predict nothing; the first label is never used
        labels[:, 1:].masked_fill_(mask[:, :-1] == 0, -100)
    if task == "masked":
        labels.masked_fill_(torch.rand(b, s, generator=generator) < 0.4, -100)
    if task == "seq2seq":
        labels = torch.randint(3, VOCAB, (b, TARGET_LENGTH), generator=generator)
        if case.labels == "none" or case.embeds:
            batch["decoder_input_ids"] = labels.roll(1, 1)
    if case.labels == "empty":
        labels.fill_(-100)
    if case.labels != "none":
        batch["labels"] = labels
    if case.labels == "counted":
        batch["num_items_in_batch"] = torch.tensor(2 * b * s)
    return batch


def attention_mask(case: Case, generator: torch.Generator) -> Tensor:
    """[B, S], 1 for real tokens. Every row has a real token, except under "row"."""
    b, s = case.batch, case.length
    mask = torch.ones(b, s, dtype=torch.long)
    for row in range(b):
        # one row is full unless it is the only one
        gone = min((row if b > 1 else 1) * max(1, s // 3), s - 1)
        if case.padding == "right" and gone:
            mask[row, s - gone :] = 0
        if case.padding == "left":
            mask[row, :gone] = 0
    if case.padding == "row":
        mask[-1] = 0
    if case.padding == "holes":
        mask = (torch.rand(b, s, generator=generator) < 0.7).long()
        mask[:, 0] = 1
    return mask


def _put_special_input(batch: Batch, case: Case) -> None:
    if not case.special.endswith(("-input", "-padding")):
        return
    x = next(v for v in batch.values() if isinstance(v, Tensor) and v.is_floating_point())
    value = float("nan") if case.special.startswith("nan") else float("inf")
    if case.special == "nan-padding":
        x[batch["attention_mask"] == 0] = value
    else:
        x[-1, -1].view(-1)[3] = value


def plainest(case: Case) -> Case:
    """The default case of the same family."""
    return replace(Case(), family=case.family).tidy()
