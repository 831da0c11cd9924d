"""The architecture classes that have a formula, and the sizes at which each of them is traced.

A row says how to make a config of given sizes, and which of its fields hold them. Nothing here is a number of bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers

from .symbols import Size

# `columns`, `rows` and `few_rows` are those of a chunk of logits, which has at most 2^28 elements, and of the part of
# one that is cast: what `quick.formula.with_chunks` computes from the other sizes.
_SHARED = {
    "batch": Size(11, 11, {}),
    "seq": Size(128 * 43, 43, {}),
    # a causal model's loss has one row less per sequence
    "labels": Size(128 * 43 - 1, 5503, {}),
    "ffn": Size(128 * 31, 31, {}),
    "columns": Size(16 * 277, 277, {}),
    "vocab": Size(16 * 967, 967, {}),
    "rows": Size(64 * 271, 271, {}),
    "few_rows": Size(16 * 67, 67, {}),
    "positions": Size(128 * 47, 47, {}),
    "tile": Size(64 * 59, 59, {}),
    "experts": Size(41, 41, {}),
    "active": Size(19, 19, {}),
}
# sizes for heads of which several share one key
GROUPED = {
    **_SHARED,
    "head": Size(64 * 3, 3, {}),
    "kv_heads": Size(7, 7, {}),
    "groups": Size(5, 5, {}),
    "hidden": Size(512 * 13, 13, {}),
    "rank": Size(37, 37, {}),
}
# the same, where no key is shared
SINGLE = {name: size for name, size in GROUPED.items() if name != "groups"}
# all heads together are as wide as the hidden state, and each has 64 features, as in all published models
HEAD = 64
JOINED = {**_SHARED, "kv_heads": Size(16 * 7, 7, {}), "rank": Size(37, 37, {})}


@dataclass(frozen=True)
class Family:
    """One architecture class.

    Args:
        config: The config class.
        fields: Size -> field of the config.
        flavours: Name of a flavour -> its fields of the config; each flavour is traced separately.
        options: Fields that every probe has.
        task: The task that the class is for.
        grouped: Whether heads may share keys; heads with and without shared keys are traced separately.
        learned_positions: Whether positions are a table, which no sequence may exceed.
        reserved: Rows of that table that belong to no token.
        period: Number of layers from one that attends to everything to the next, if the others have windows; 0: no
            layer has a window.
        tile: The input of the MLP's first weight, by which the preset `long` computes the rows of a tile.
    """

    config: type[Any]
    fields: Mapping[str, str]
    flavours: Mapping[str, Mapping[str, Any]]
    options: Mapping[str, Any] = field(default_factory=dict)
    task: str = "causal"
    grouped: tuple[bool, ...] = (True,)
    learned_positions: bool = False
    reserved: int = 0
    period: int = 0
    tile: str = "hidden"


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
_DISTILBERT = {
    "layers": "n_layers", "hidden": "dim", "ffn": "hidden_dim", "vocab": "vocab_size", "heads": "n_heads",
    "positions": "max_position_embeddings",
}  # fmt: skip
_MIXTRAL = {**_DECODER, "experts": "num_local_experts", "active": "num_experts_per_tok"}
_QWEN3_MOE = {**_MIXTRAL, "ffn": "moe_intermediate_size", "experts": "num_experts"}
_TABLE: dict[str, Any] = {"grouped": (False,), "learned_positions": True}
_UNTIED = {"untied": {"tie_word_embeddings": False}}
_TIED = {"tied": {"tie_word_embeddings": True}}
_TIES = {**_TIED, **_UNTIED}
_ENCODERS = {"Bert": (transformers.BertConfig, _ENCODER, 0), "Roberta": (transformers.RobertaConfig, _ENCODER, 2),
             "DistilBert": (transformers.DistilBertConfig, _DISTILBERT, 0)}  # fmt: skip
_HEADS = {"ForMaskedLM": "mlm", "ForSequenceClassification": "classification"}
_MOE = {"output_router_logits": False}
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(transformers.LlamaConfig, _DECODER, _TIES, grouped=(True, False)),
    "MistralForCausalLM": Family(transformers.MistralConfig, _DECODER, _UNTIED, period=1),
    "Qwen2ForCausalLM": Family(transformers.Qwen2Config, _DECODER, _TIES),
    "Qwen3ForCausalLM": Family(transformers.Qwen3Config, _DECODER, _TIES),
    "Gemma2ForCausalLM": Family(transformers.Gemma2Config, _DECODER, _TIED, period=2),
    "Gemma3ForCausalLM": Family(transformers.Gemma3TextConfig, _DECODER, _TIED, period=6),
    "MixtralForCausalLM": Family(transformers.MixtralConfig, _MIXTRAL, _UNTIED, _MOE),
    "Qwen3MoeForCausalLM": Family(transformers.Qwen3MoeConfig, _QWEN3_MOE, _UNTIED, _MOE),
    "GPT2LMHeadModel": Family(transformers.GPT2Config, _GPT2, {"dropout": {}}, **_TABLE, tile="ffn"),
    **{
        f"{name}{head}": Family(config, fields, {"dropout": {}}, **_TABLE, reserved=reserved, task=task)
        for name, (config, fields, reserved) in _ENCODERS.items()
        for head, task in _HEADS.items()
    },
}
_OF_EXPERTS = ("experts", "active")
# sizes of chunks of rows, and the widths of the tensors that are made from a chunk
_IN_TURNS, _OF_ROWS = ("rows", "few_rows", "tile"), ("vocab", "hidden", "ffn")
# windows that no probe's sequence, or every probe's sequence, fits into
_NARROW, _WIDE = 64, 2**20


def sizes_of(family: Family, grouped: bool) -> Mapping[str, Size]:
    """The sizes of the probe."""
    found = JOINED if "kv_heads" not in family.fields else GROUPED if grouped else SINGLE
    # a size that the model does not have could be found by chance in the bytes of a chunk's last turn
    return {name: size for name, size in found.items() if name not in _OF_EXPERTS or name in family.fields}


def left_over(sizes: Mapping[str, Size]) -> frozenset[int]:
    """Bytes of the tensors of a chunk's last turn, which has the remaining rows and no size of its own.

    For example, 128 remaining rows of logits would be read as a constant times the vocabulary, and in a small batch
    this would be more than a whole chunk. A last turn is never larger than the turns before it, so the formula does not
    need it.
    """
    value = {name: size.value for name, size in sizes.items()}
    rows = {value["batch"] * value[of] % value[chunk] for of in ("seq", "labels") for chunk in _IN_TURNS}
    # an element has 1 to 8 bytes; the last doubling is for two results side by side
    widths = {value[name] << doubled for name in _OF_ROWS if name in value for doubled in range(5)}
    return frozenset(count * width for count in rows for width in widths if count)


def probe(name: str, flavour: str, grouped: bool, layers: int, windowed: bool = False) -> Any:
    """A config of the class at the probe's sizes; if `windowed`, its sequences are longer than its windows."""
    family = FAMILIES[name]
    sizes = sizes_of(family, grouped)
    values = {size: value.value for size, value in sizes.items()}
    values["layers"] = layers
    values["heads"] = values["kv_heads"] * values.get("groups", 1)
    values.setdefault("head", HEAD)
    values.setdefault("hidden", values["heads"] * values["head"])
    fields = {where: values[size] for size, where in family.fields.items()}
    options = {"pad_token_id": 0, **family.options, **family.flavours[flavour]}
    if family.period:
        options["sliding_window"] = _NARROW if windowed else _WIDE
    # first a width that the heads divide, and then the real one, which they do not divide
    width = {family.fields["hidden"]: values["heads"] * values["head"]}
    config = family.config(**{**fields, **width}, **options)
    setattr(config, family.fields["hidden"], values["hidden"])
    config.architectures = [name]
    return config
