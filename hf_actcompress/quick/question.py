"""A question to the formula, and the data that answer it. It imports neither torch nor transformers.

`resources/formula.js` holds the same in JavaScript.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import ModelConfigError, UnknownOptionError
from .config_rules import check_config
from .formula import QuickEstimate, evaluate
from .optimizers import FOREACH, OF_TRAINER
from .strategies import STRATEGIES

_FOLDER = Path(__file__).parent / "data"
_NAMES = tuple(path.stem for path in sorted(_FOLDER.glob("*.json")))

SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
_QUANTIZED = {"nf4": "qlora", "int8": "int8"}
# an answer says so if a larger share of the frozen weights is not packed
MOST_UNPACKED = 0.2
# bytes of a packed weight: 4 bits, a byte per 64 of them, and fp32 per 256 of these; or 8 bits
_PACKED = {"qlora": 1 / 2 + 1 / 64 + 4 / (64 * 256), "int8": 1.0}
# mode in which the head is trained -> bytes of a logit
_TRAINED = {"fp32": 4, "bf16": 2, "autocast": 2}
# the rank of peft's LoraConfig
LORA_RANK = 8
# the grouped products of experts read rows that begin at multiples of 16 bytes
_EXPERTS = 8
_MISSING = object()
# embeddings of these classes have no padding token
_WITHOUT_PADDING = ("GPT2LMHeadModel",)
# the fewest rows of a tile
_LEAST_TILE = 256


def classes() -> dict[str, dict[str, Any]]:
    """Architecture class -> its data."""
    return {name: _data(name) for name in _NAMES}


@cache
def _data(name: str) -> dict[str, Any]:
    return dict(json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Question:
    """A model and how it is trained.

    Args:
        name: Architecture class.
        data: The class's data.
        key: The key of the cases: flavour, kind of heads, mode.
        sizes: Sizes of the model, and the adapters' rank.
        window: Tokens that attention reaches back; None: all.
        reserved: Rows of the table of positions that belong to no token.
    """

    name: str
    data: Mapping[str, Any]
    key: str
    sizes: Mapping[str, int]
    window: int | None
    reserved: int

    @property
    def strategies(self) -> list[str]:
        """Names of the strategies that the formula knows for this model and training."""
        return list(self.data["cases"][self.key])

    @property
    def most_tokens(self) -> int:
        """How long a sequence may be."""
        most = self.sizes["positions"] - self.reserved
        return most if self.window is None or self._windowed in self.data["cases"] else min(most, self.window - 1)

    @property
    def _windowed(self) -> str:
        """The key of the cases of sequences that are longer than attention's window."""
        return f"{self.key}/windowed"

    def answer(self, strategy: str, batch_size: int, seq_len: int, optimizer: str = "adamw") -> QuickEstimate:
        """The estimate.

        Raises:
            ModelConfigError: The sequence is longer than the learned positions, or than a window without cases for it.
            UnknownOptionError: Unknown strategy or optimizer.
        """
        self.check_length(seq_len)
        cases = self.data["cases"][self.key if self.window is None or seq_len < self.window else self._windowed]
        if strategy not in cases:
            raise UnknownOptionError("strategy", strategy, cases)
        row, known = OF_TRAINER.get(optimizer, optimizer), (FOREACH, *self.data["optimizers"])
        if row not in known:
            raise UnknownOptionError("optimizer", optimizer, [*known, *OF_TRAINER])
        sizes = {**self.sizes, "batch": batch_size, "seq": seq_len, "logits_itemsize": self._logits_itemsize(strategy)}
        return evaluate(self.data, cases[strategy], row, sizes)

    def _logits_itemsize(self, strategy: str) -> int:
        """Bytes of a logit that the head may keep to backward; 0 if it keeps none."""
        preset = STRATEGIES[strategy][0]
        if preset in (None, "offload") or self.data["task"] == "classification":
            return 0
        return _TRAINED.get(self.key.split("/")[-1], 0)

    @property
    def packed_share(self) -> float | None:
        """The share of the frozen weights that are packed, from the bytes with and without; None without quantisation.

        The adapters' gradients have as many bytes as the adapters.
        """
        base, _, mode = self.key.rpartition("/")
        if mode not in _PACKED:
            return None
        packed = self.answer("stock", 1, 1)
        whole = replace(self, key=f"{base}/bf16").answer("stock", 1, 1).weights_bytes
        saved = whole - (packed.weights_bytes - packed.gradients_bytes)
        return saved / (2 - _PACKED[mode]) / (whole / 2)

    def check_length(self, seq_len: int) -> None:
        """Raise ModelConfigError if the formula does not hold for such a sequence."""
        positions = self.sizes["positions"] - self.reserved
        if self.data["learned_positions"] and seq_len > positions:
            raise ModelConfigError(
                f"{self.name} has learned positions for {positions:,} tokens, and {seq_len:,} were asked for; shorten "
                "the sequences"
            )
        if self.window is not None and seq_len >= self.window and self._windowed not in self.data["cases"]:
            raise ModelConfigError(
                f"its attention reaches {self.window:,} tokens back, and the formula holds below that many; "
                "`estimate` without it counts the masks that longer sequences need"
            )


def question(
    config: Mapping[str, Any],
    dtype: str | None = None,
    autocast: str | None = None,
    lora: bool | int | None = None,
    quantization: str | None = None,
) -> Question:
    """The data about a model.

    Args:
        config: What its config.json holds.
        dtype, autocast, lora, quantization: As for `estimate`.

    Raises:
        ModelConfigError: There is no formula for the class, or not for a model of this config or this training.
    """
    check_config(config)
    name = _class_of(config)
    data = _data(name)
    values = {**data["defaults"], **config}
    check_config(values)
    _check_structure(name, data, values)
    flavour = _flavour(data, values)
    sizes = _sizes(data, values)
    reserved = _reserved(name, data, values, sizes)
    _check_heads(name, data, values, sizes)
    sizes["rank"] = LORA_RANK if lora is True or not lora else int(lora)
    # also for quantised weights, because a linear layer knows the width of its inputs
    sizes["tile"] = max(_LEAST_TILE, sizes[data["tile"]] // 2)
    mode = _mode(dtype or values.get("dtype") or values.get("torch_dtype"), autocast, bool(lora), quantization)
    sizes["adafactor"] = _adafactor_step(sizes, mode)
    key = f"{flavour}/{'grouped' if sizes['groups'] > 1 else 'single'}/{mode}"
    if key not in data["cases"]:
        raise ModelConfigError(f"there is no formula for {name}, {key}; known: {', '.join(data['cases'])}")
    window = values.get("sliding_window") if values.get("use_sliding_window", True) else None
    return Question(name, data, key, sizes, window, reserved)


def _class_of(config: Mapping[str, Any]) -> str:
    stated = config.get("architectures") or []
    for name in stated:
        # the data of all others would take longer to read than the answer to compute
        if name in _NAMES:
            return str(name)
    known = classes()
    same = [name for name, data in known.items() if data["model_type"] == config.get("model_type")]
    if same and not stated:
        return min(same, key=lambda name: known[name]["task"] == "classification")
    what = ", ".join(stated) or config.get("model_type") or "a config without architectures and model_type"
    raise ModelConfigError(f"there is no formula for {what}; known: {', '.join(known)}. `estimate` takes any model")


def _check_structure(name: str, data: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    for field, expected in {"model_type": data["model_type"], **data["structure"]}.items():
        # a field that the config leaves out has the default of its class
        if values.get(field, expected) != expected:
            raise ModelConfigError(
                f"the formula of {name} is for {field}={expected!r}, and this config has {values[field]!r}; "
                "`estimate` takes any model"
            )
    types, period = values.get("layer_types"), data["period"]
    if period > 1 and any((kind == "full_attention") != (i % period == 0) for i, kind in enumerate(types or (), 1)):
        raise ModelConfigError(f"the formula of {name} is for one layer of full attention in each {period}, the last")
    if values.get("quantization_config"):
        raise ModelConfigError("the formula does not read a quantization_config; ask for QLoRA instead")


def _check_heads(name: str, data: Mapping[str, Any], values: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Refuse the shapes that the formula was not traced for, or that the model's class refuses."""
    hidden, head, heads = sizes["hidden"], sizes["head"], sizes["groups"] * sizes["kv_heads"]
    if data["head"] not in (None, head):
        raise ModelConfigError(f"the formula of {name} is for heads of {data['head']} features, not {head}")
    if hidden % heads:
        raise ModelConfigError(f"the formula of {name} is for a width that {heads} heads divide, not for {hidden}")
    if not data["learned_positions"] and head % 2:
        raise ModelConfigError(f"rotary positions turn pairs of features, and {name} has heads of {head} here")
    if "experts" in sizes and (hidden % _EXPERTS or sizes["ffn"] % _EXPERTS):
        widths = f"{hidden} and {sizes['ffn']}"
        raise ModelConfigError(f"products of experts need widths that are multiples of {_EXPERTS}, not {widths}")
    if data["period"] > 1 and values.get("sliding_window") is None:
        raise ModelConfigError(f"{name} needs a sliding_window, and this config has none")


def _flavour(data: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    for flavour, options in data["flavours"].items():
        if all(values.get(field) == value for field, value in options.items()):
            return str(flavour)
    raise ModelConfigError(f"there is no formula for such a config; known: {json.dumps(data['flavours'])}")


def _reserved(name: str, data: Mapping[str, Any], values: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    """Rows of the table of positions that belong to no token: in RoBERTa those up to the padding token's.

    Raises:
        ModelConfigError: An embedding has no row for the padding token, or RoBERTa has no such token.
    """
    known = int(data["reserved"])
    padding = values.get("pad_token_id", known - 1)
    if name in _WITHOUT_PADDING or (padding is None and not known):
        return known
    rows = min(sizes["vocab"], sizes["positions"]) if known else sizes["vocab"]
    if type(padding) is not int:
        raise ModelConfigError(
            f"{name} cannot be made from this config: pad_token_id is {padding!r}; state the padding token there"
        )
    if not -rows <= padding < rows:
        # the words in which torch refuses such a model
        raise ModelConfigError(f"{name} cannot be made from this config: Padding_idx must be within num_embeddings")
    return padding % sizes["positions"] + 1 if known else 0


def _sizes(data: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, int]:
    fields: Mapping[str, str] = data["fields"]
    found: dict[str, Any] = {size: values.get(field) for size, field in fields.items()}
    # only some classes compute the width of an MLP that is left out
    optional = {"head", "kv_heads"} if data["defaults"][fields["ffn"]] is not None else {"ffn", "head", "kv_heads"}
    # what a class computes where it is left out is not always computed where it is null
    if fields.get("head") in values and data["defaults"].get(fields["head"], _MISSING) is not None:
        optional -= {"head"}
    for size in fields:
        left_out = found[size] is None and size in optional
        if not left_out and (type(found[size]) is not int or found[size] < 1):
            raise ModelConfigError(f"the formula needs {fields[size]} above 0, and this config has {found[size]!r}")
    hidden, heads = found["hidden"], found["heads"]
    kv_heads = found.get("kv_heads") or heads
    found |= {"ffn": found["ffn"] or 4 * hidden, "head": found.get("head") or hidden // heads}
    if kv_heads == 1 and heads > 1:
        # a single head has the memory layout of its transpose, so the copies of other cases are not made
        raise ModelConfigError("the formula is for several heads of keys, not for one; `estimate` takes any model")
    del found["heads"]
    return {**found, "kv_heads": kv_heads, "groups": heads // kv_heads}


def _adafactor_step(sizes: Mapping[str, int], mode: str) -> int:
    """Bytes that Adafactor's step makes for the largest weight: fp32 squares, updates, and copies of narrower weights.

    Those for adapters' weights are not counted.
    """
    largest = max(sizes["vocab"], 2 * sizes["experts"] * sizes["ffn"] if "experts" in sizes else sizes["ffn"])
    return {"fp32": 8, "autocast": 8, "bf16": 16}.get(mode, 0) * largest * sizes["hidden"]


def _mode(dtype: str | None, autocast: str | None, lora: bool, quantization: str | None) -> str:
    name = str(dtype or "float32").removeprefix("torch.")
    half = SHORT_DTYPES.get(name, name) in ("bfloat16", "float16")
    if quantization is not None and (quantization not in _QUANTIZED or not lora or not half):
        raise ModelConfigError("the formula for quantised weights is that of LoRA over nf4 or int8 with bf16 or fp16")
    if half and not autocast:
        return _QUANTIZED[quantization] if quantization else "lora" if lora else "bf16"
    if not lora and (autocast or SHORT_DTYPES.get(name, name) == "float32"):
        return "autocast" if autocast else "fp32"
    if SHORT_DTYPES.get(name, name) not in (*SHORT_DTYPES.values(), "float64"):
        raise UnknownOptionError("dtype", name, [*dict.fromkeys(SHORT_DTYPES.values()), *SHORT_DTYPES])
    raise ModelConfigError(
        f"there is no formula for weights in {name}{' with LoRA' if lora else ''}: "
        "use bf16 or fp16 weights (--dtype bf16), or fp32 ones without LoRA"
    )
