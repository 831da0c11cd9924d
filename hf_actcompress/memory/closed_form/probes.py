"""The architecture classes that have a formula, and the sizes that each is traced at.

A row says how to make a config of given sizes, and which of its fields hold them. Nothing here is a number of bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers

from .symbols import Size

# 2^25 elements are the most of one chunk of logits: so many columns or rows of them. All values are checked below.
_SHARED = {
    "batch": Size(11, 11, {}),
    "seq": Size(128 * 43, 43, {}),
    # a causal model's loss has one row less per sequence
    "labels": Size(128 * 43 - 1, 5503, {}),
    "ffn": Size(128 * 31, 31, {}),
    "columns": Size(32 * 17, 17, {}),
    "vocab": Size(32 * 17 * 23, 23, {"columns": 1}),
    "rows": Size(16 * 167, 167, {}),
    "few_rows": Size(32 * 59, 59, {}),
    "positions": Size(128 * 47, 47, {}),
}
# heads of their own size, and several that share one key
GROUPED = {
    **_SHARED,
    "head": Size(64 * 3, 3, {}),
    "kv_heads": Size(7, 7, {}),
    "groups": Size(5, 5, {}),
    "hidden": Size(64 * 13, 13, {}),
    "rank": Size(4 * 37, 37, {}),
}
# the same, where no key is shared
SINGLE = {name: size for name, size in GROUPED.items() if name != "groups"}
# the heads together are as wide as the hidden state, and each has 64 features, as in all models that are published
HEAD = 64
JOINED = {**_SHARED, "kv_heads": Size(8 * 7, 7, {}), "rank": Size(8 * 37, 37, {})}


@dataclass(frozen=True)
class Family:
    """One architecture class.

    Args:
        config: Its config class.
        fields: Size -> field of the config.
        variants: Name of a variant -> what a config has there; each is traced for itself.
        options: Fields that every probe has.
        task: What the class is for.
        grouped: Whether heads share keys; both are traced for themselves.
        learned_positions: Whether they are a table, which no sequence may exceed.
    """

    config: type[Any]
    fields: Mapping[str, str]
    variants: Mapping[str, Mapping[str, Any]]
    options: Mapping[str, Any] = field(default_factory=dict)
    task: str = "causal"
    grouped: tuple[bool, ...] = (True,)
    learned_positions: bool = False


_DECODER = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "ffn": "intermediate_size", "vocab": "vocab_size",
    "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head": "head_dim",
    "positions": "max_position_embeddings",
}  # fmt: skip
_ENCODER = {name: where for name, where in _DECODER.items() if name not in ("kv_heads", "head")}
_GPT2 = {
    "layers": "n_layer", "hidden": "n_embd", "ffn": "n_inner", "vocab": "vocab_size", "heads": "n_head",
    "positions": "n_positions",
}  # fmt: skip
_TABLE: dict[str, Any] = {"grouped": (False,), "learned_positions": True}
_UNTIED = {"untied": {"tie_word_embeddings": False}}
_TIES = {"tied": {"tie_word_embeddings": True}, **_UNTIED}
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(transformers.LlamaConfig, _DECODER, _TIES, grouped=(True, False)),
    "MistralForCausalLM": Family(transformers.MistralConfig, _DECODER, _UNTIED, {"sliding_window": None}),
    "Qwen2ForCausalLM": Family(transformers.Qwen2Config, _DECODER, _TIES),
    "Qwen3ForCausalLM": Family(transformers.Qwen3Config, _DECODER, _TIES),
    "GPT2LMHeadModel": Family(transformers.GPT2Config, _GPT2, {"dropout": {}}, **_TABLE),
    "BertForMaskedLM": Family(transformers.BertConfig, _ENCODER, {"dropout": {}}, **_TABLE, task="mlm"),
    "BertForSequenceClassification": Family(
        transformers.BertConfig, _ENCODER, {"dropout": {}}, **_TABLE, task="classification"
    ),
}


def sizes_of(family: Family, grouped: bool) -> Mapping[str, Size]:
    """The probe's sizes."""
    if "kv_heads" not in family.fields:
        return JOINED
    return GROUPED if grouped else SINGLE


def probe(name: str, variant: str, grouped: bool, layers: int) -> Any:
    """A config of the class at the probe's sizes."""
    family = FAMILIES[name]
    sizes = sizes_of(family, grouped)
    values = {size: value.value for size, value in sizes.items()}
    values["layers"] = layers
    values["heads"] = values["kv_heads"] * values.get("groups", 1)
    values.setdefault("head", HEAD)
    values.setdefault("hidden", values["heads"] * values["head"])
    fields = {where: values[size] for size, where in family.fields.items()}
    options = {"pad_token_id": 0, **family.options, **family.variants[variant]}
    # any width that heads divide, and then the one that they do not
    width = {family.fields["hidden"]: values["heads"] * values["head"]}
    config = family.config(**{**fields, **width}, **options)
    setattr(config, family.fields["hidden"], values["hidden"])
    config.architectures = [name]
    return config
