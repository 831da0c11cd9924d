"""Tiny configs of any model type, made from the type's own defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from .layers import layer_fields
from .overrides import OVERRIDES
from .rules import DROPOUT, FIRST_TEXT_TOKEN, HEAD_DIM, HEADS, SKIPPED, TOKEN, VOCAB, list_of, size_of

# fields of every config that are no part of its architecture
_GENERAL = {"id2label", "label2id", "problem_type", "architectures", "dtype", "transformers_version", "return_dict"}


def tiny_config(model_type: str, *, dropout: float = 0.0, **options: Any) -> Any:
    """The type's config at tiny size: two layers or one of every kind, every dropout at `dropout`.

    Raises whatever the config's own checks raise.
    """
    options = {**OVERRIDES.get(model_type, {}).get("", {}), **options}
    return _shrunk(_default(model_type), dropout, {}, {**OVERRIDES.get(model_type, {}), "": options})


def _default(model_type: str) -> Any:
    needed = OVERRIDES.get(model_type, {}).get("needed", {})
    return CONFIG_MAPPING[model_type](**{k: _made(v) for k, v in needed.items()})


def _made(value: Any) -> Any:
    """In a row, ("type", {options}) stands for the config of a part."""
    if isinstance(value, tuple) and len(value) == 2 and value[0] in CONFIG_MAPPING:
        return tiny_config(value[0], **value[1])
    return value


def _shrunk(default: Any, dropout: float, tokens: dict[str, int], row: Mapping[str, Any]) -> Any:
    fields = {k: v for k, v in vars(default).items() if not k.startswith("_") and k not in _GENERAL}
    parts = {k: v for k, v in fields.items() if isinstance(v, PretrainedConfig)}
    vocab = min([VOCAB, *(v for k, v in fields.items() if k == "vocab_size" and type(v) is int and v > 8)])
    new = _own(default, fields, parts)
    for name, value in fields.items():
        if name in parts or (name == "hidden_size" and "depths" in fields and "embed_dim" in fields):
            continue
        changed = _field(name, value, dropout, tokens, vocab)
        if changed is not None and changed != value:
            new[name] = changed
    new |= layer_fields(fields)
    if "num_hidden_layers" not in new and getattr(default, "_out_features", None):
        # a pyramid keeps its stages; those of a stack of layers are left out with its layers
        new["out_features"] = list(default._out_features)
    new |= _tied(fields, new)
    for name, part in parts.items():
        # a row of the part's own type, then what this type's row says of the part
        own = dict(OVERRIDES.get(part.model_type, {}))
        own[""] = {**own.get("", {}), **row.get(name, {})}
        new[name] = _shrunk(part, dropout, tokens, own)
    new |= {k: _made(v) for k, v in row.get("", {}).items()}
    if "num_labels" not in new and len(getattr(default, "id2label", None) or {}) != 3:
        new["num_labels"] = 3
    if getattr(default, "pad_token_id", 0) is None and hasattr(default, "vocab_size"):
        new.setdefault("pad_token_id", 0)
    return type(default)(**new)


def _own(default: Any, fields: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a part's config that differ from the defaults of its class."""
    try:
        plain = vars(type(default)())
    except Exception:
        return {}
    return {k: v for k, v in fields.items() if k not in parts and k in plain and plain[k] != v}


def _tied(fields: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Fields whose value must be equal to another field's, or follow from it."""
    out: dict[str, Any] = {}
    for name in ("num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads"):
        heads = fields.get(name.replace("key_value_heads", "attention_heads").replace("kv_heads", "heads"))
        if type(heads) is int and fields.get(name) == heads:
            out[name] = HEADS
    if fields.get("qk_rope_head_dim") and fields.get("head_dim") == fields["qk_rope_head_dim"]:
        out["head_dim"] = new.get("qk_rope_head_dim", fields["qk_rope_head_dim"])
    first = fields.get("num_heads")
    if isinstance(first, (list, tuple)) and type(fields.get("embed_dim")) is int:
        out["embed_dim"] = first[0] * 8
    return out


def _field(name: str, value: Any, dropout: float, tokens: dict[str, int], vocab: int) -> Any:
    """The new value of one field, or None if it stays."""
    if TOKEN.search(name):
        return _token(name, value, tokens)
    if name.startswith("rope_parameters") and isinstance(value, dict):
        return _rope(value)
    if name == "image_grid_pinpoints":
        return [[64, 64], [32, 64]]
    if isinstance(value, bool) or value is None:
        return None
    if SKIPPED.search(name) and isinstance(value, (int, float)):
        return 0.0
    if DROPOUT.search(name):
        if isinstance(value, (int, float)):
            return dropout
        if isinstance(value, (list, tuple)) and all(isinstance(x, float) for x in value):
            return type(value)(dropout for _ in value)
    if isinstance(value, int):
        return size_of(name, value)
    if isinstance(value, (list, tuple)) and value and all(type(x) is int for x in value) and list_of(name, value):
        return list_of(name, value)
    if isinstance(value, (list, tuple)) and name in ("image_size", "patch_size"):
        return type(value)(size_of(name, x) if isinstance(x, int) else x for x in value)
    return None


def _token(name: str, value: Any, tokens: dict[str, int]) -> Any:
    """Special tokens keep small numbers. Others get a number below the text tokens."""
    if isinstance(value, (list, tuple)):
        return [_token(f"{name}{i}", x, tokens) for i, x in enumerate(value)]
    if type(value) is not int or value < 8:
        return value
    return tokens.setdefault(name.replace("_index", "_id"), 8 + len(tokens) % (FIRST_TEXT_TOKEN - 8))


def _rope(value: dict[str, Any]) -> dict[str, Any]:
    """Sections of multimodal angles are scaled to the head's size; nested dictionaries of layer types as well."""
    out: dict[str, Any] = {k: _rope(v) if isinstance(v, dict) else v for k, v in value.items()}
    if isinstance(out.get("mrope_section"), (list, tuple)):
        half = int(HEAD_DIM * out.get("partial_rotary_factor", 1.0)) // 2
        parts = len(out["mrope_section"])
        sections = [max(1, half // parts)] * parts
        sections[0] = max(0, half - sum(sections[1:]))
        if sum(sections) > half:
            sections = [1] * half + [0] * (parts - half)
        out["mrope_section"] = type(out["mrope_section"])(sections)
    if "original_max_position_embeddings" in out:
        out["original_max_position_embeddings"] = 32
    return out
