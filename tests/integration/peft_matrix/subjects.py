"""The models that PEFT methods are tried on: five families, and the names of their modules that a method can adapt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.families import BY_NAME, Batch, Family


@dataclass(frozen=True)
class Subject:
    """One model.

    Attributes:
        task_type: PEFT's name of the task, or None where PEFT has no name for it.
        linear: Linear layers of several shapes: of the attention and of the MLP.
        square: Those of them with as many outputs as inputs.
        feedforward: Those of them that lead out of the MLP. IA3 scales their input instead of their output.
        norms: The norms of a layer.
        embedding: The table of the tokens. A model of images has none.
        head: The layer that makes the logits.
        convolution: A Conv2d, where the model has one.
    """

    family: Family
    task_type: str | None
    linear: tuple[str, ...]
    square: tuple[str, ...]
    feedforward: tuple[str, ...]
    norms: tuple[str, ...]
    embedding: str
    head: str
    convolution: str = ""

    @property
    def name(self) -> str:
        return self.family.name

    def batch(self) -> Batch:
        """Padded on the right where the model takes a mask."""
        batch = self.family.make_batch("right" if "right" in self.family.paddings else "none")
        if self.family.model.endswith("SequenceClassification"):
            generator = torch.Generator().manual_seed(0)
            batch["labels"] = torch.randint(0, 2, (batch["input_ids"].shape[0],), generator=generator)
        return batch


SUBJECTS: tuple[Subject, ...] = (
    Subject(
        BY_NAME["llama"], "CAUSAL_LM", ("q_proj", "v_proj", "up_proj", "down_proj"), ("q_proj", "o_proj"),
        ("down_proj",), ("input_layernorm", "post_attention_layernorm"), "embed_tokens", "lm_head",
    ),
    Subject(
        BY_NAME["gpt2-gelu-tanh"], "CAUSAL_LM", ("c_attn", "c_fc", "mlp.c_proj"), ("attn.c_proj",), ("mlp.c_proj",),
        ("ln_1", "ln_2"), "wte", "lm_head",
    ),
    Subject(
        BY_NAME["bert"], None, ("query", "value", "intermediate.dense", "output.dense"), ("query", "value"),
        ("output.dense",), ("LayerNorm",), "word_embeddings", "decoder",
    ),
    Subject(
        BY_NAME["t5"], "SEQ_2_SEQ_LM", ("q", "v", "wi", "wo"), ("q", "v"), ("wo",), ("layer_norm",), "shared",
        "lm_head",
    ),
    Subject(
        BY_NAME["vit"], None, ("q_proj", "v_proj", "fc1", "fc2"), ("q_proj", "v_proj"), ("fc2",),
        ("layernorm_before", "layernorm_after"), "", "classifier", "projection",
    ),
)  # fmt: skip
BY_SUBJECT: dict[str, Subject] = {subject.name: subject for subject in SUBJECTS}

_CLASSIFIER = {"bert": "BertForSequenceClassification"}


def for_prompts(subject: Subject) -> Subject:
    """The same model with a head that PEFT's prompt methods know: they add tokens and may have to extend the labels."""
    model = _CLASSIFIER.get(subject.name)
    if model is None:
        return subject
    return replace(subject, family=replace(subject.family, model=model), task_type="SEQ_CLS", head="classifier")


def options_of(subject: Subject) -> dict[str, Any]:
    """The options of every PEFT config for this model."""
    return {"task_type": subject.task_type}
