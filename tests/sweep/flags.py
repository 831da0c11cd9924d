"""More rows for the sweep: configs with one flag changed from its default, in fewer modes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from .catalogue import Pair
from .configs import tiny_config

# a pair, the flag ("" for none) and the options of the config
Work = tuple[Pair, str, dict[str, Any]]

# flags that change what layers compute, as opposed to what the model returns or how it is trained
FLAGS = (
    "attention_bias", "mlp_bias", "qkv_bias", "use_bias", "bias", "add_bias_linear", "use_qk_norm", "qk_norm",
    "qk_layernorm", "tie_word_embeddings", "parallel_attn", "use_parallel_residual", "new_decoder_architecture",
    "multi_query", "alibi", "normalize_before", "do_layer_norm_before", "scale_embedding", "layer_norm_before",
    "norm_topk_prob", "mamba_proj_bias", "mamba_conv_bias", "use_conv_bias", "scale_attn_by_inverse_layer_idx",
    "reorder_and_upcast_attn", "use_swiglu_ffn", "layerscale", "use_rel_pos", "use_abs_pos", "is_decoder",
    "attn_logit_softcapping", "attention_k_eq_v", "apply_residual_connection_post_layernorm", "rms_norm", 
    "residual_in_fp32",
)  # fmt: skip
TASKS = ("tokens", "target", "class")


def with_flags(pairs: list[Pair]) -> list[Work]:
    """Every flag of every type once, with the first class of the type."""
    work: list[Work] = []
    seen: set[str] = set()
    for pair in pairs:
        if pair.type in seen or pair.task not in TASKS:
            continue
        seen.add(pair.type)
        with suppress(Exception):
            work += [(pair, f"{flag}={value}", {flag: value}) for flag, value in flipped(tiny_config(pair.type))]
            work += [(pair, "sliding_attention", options) for options in _sliding(tiny_config(pair.type))]
    return work


def flipped(config: Any) -> list[tuple[str, bool]]:
    """The flags that the config has, each with the value that is not its default."""
    values = vars(config)
    return [(flag, not values[flag]) for flag in FLAGS if type(values.get(flag)) is bool]


def _sliding(config: Any) -> list[dict[str, Any]]:
    """Options for a sliding and a full layer, if the config can name both and names only full ones."""
    kinds = getattr(config, "layer_types", None)
    if not kinds or set(kinds) != {"full_attention"} or not hasattr(config, "sliding_window"):
        return []
    return [{"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": True}]
