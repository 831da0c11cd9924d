"""The models of the fuzz: the table of tests/families.py and a few architectures that it has no row for."""

from __future__ import annotations

from typing import Any

from tests.families import BY_NAME, VOCAB, Family

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
_DECODER = {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 56, "use_cache": False, "pad_token_id": 0}
_BERT_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob")

# in no mode are these rows expected to be bit-equal: their gradients are compared with the fp64 oracle
_MORE: tuple[Family, ...] = (
    Family(
        "mixtral", "MixtralConfig", {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
        "MixtralForCausalLM", ("attention_dropout",), bit_equal=(),
    ),
    Family(
        "gemma2", "Gemma2Config", {**_DECODER, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
        "Gemma2ForCausalLM", ("attention_dropout",), bit_equal=(),
    ),
    Family(
        "gpt-neox", "GPTNeoXConfig", {**_SIZES, "use_cache": False}, "GPTNeoXForCausalLM",
        ("hidden_dropout", "attention_dropout"), bit_equal=(),
    ),
    Family(
        "falcon", "FalconConfig",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "use_cache": False,
         "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2},
        "FalconForCausalLM", ("hidden_dropout", "attention_dropout"), bit_equal=(),
    ),
    Family(
        "bart", "BartConfig",
        {"vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
         "use_cache": False, "pad_token_id": 1, "decoder_start_token_id": 2, "forced_eos_token_id": None},
        "BartForConditionalGeneration", ("dropout", "attention_dropout", "activation_dropout"), "seq2seq", bit_equal=(),
    ),
    Family(
        "deberta-v2", "DebertaV2Config",
        {**_SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "pad_token_id": 0},
        "DebertaV2ForMaskedLM", _BERT_DROPOUT, "masked", bit_equal=(),
    ),
    Family("olmo2", "Olmo2Config", _DECODER, "Olmo2ForCausalLM", ("attention_dropout",), bit_equal=()),
    Family(
        "gemma3", "Gemma3TextConfig", {**_DECODER, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
        "Gemma3ForCausalLM", ("attention_dropout",), bit_equal=(),
    ),
    Family(
        "roformer", "RoFormerConfig", {**_SIZES, "embedding_size": 32, "pad_token_id": 0}, "RoFormerForMaskedLM",
        _BERT_DROPOUT, "masked", bit_equal=(),
    ),
    Family(
        "bloom", "BloomConfig",
        {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, "use_cache": False},
        "BloomForCausalLM", ("hidden_dropout", "attention_dropout"), bit_equal=(),
    ),
    Family(
        "mamba", "MambaConfig",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "use_cache": False,
         "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_mambapy": False},
        "MambaForCausalLM", (), bit_equal=(),
    ),
    Family(
        "albert", "AlbertConfig", {**_SIZES, "embedding_size": 16, "pad_token_id": 0}, "AlbertForMaskedLM",
        _BERT_DROPOUT, "masked", bit_equal=(),
    ),
)  # fmt: skip

FUZZED: dict[str, Family] = {**BY_NAME, **{family.name: family for family in _MORE}}

# these have no scaled_dot_product_attention in transformers
EAGER_ONLY = ("deberta-v2", "roformer", "bloom", "mamba")
# state-space models: what is at padding reaches the tokens behind it
NO_ATTENTION = ("mamba",)
