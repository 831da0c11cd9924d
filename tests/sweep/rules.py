"""Sizes of a tiny config's fields: rows of (pattern of the field's name, size). The first row that matches decides."""

from __future__ import annotations

import re
from typing import Any

VOCAB = 128
WIDTH = 64
HEADS = 4
KEY_VALUE_HEADS = 2
HEAD_DIM = 16
# text tokens are drawn from here on, so that none of them is a special token
FIRST_TEXT_TOKEN = 64

# fields that say how many layers a stack has
LAYERS = re.compile(
    r"^(num_hidden_layers|n_layers?|num_layers|layers|depth|(t2u_|speech_|text_)?(en|de)coder_layers|num_blocks|layer_num"
    r"|num_(en|de)coder_layers|decoder_num_hidden_layers|folding_trunk_num_hidden_layers|conf_num_hidden_layers"
    r"|[lxr]_layers|memory_attention_num_layers|mask_decoder_layers|num_attention_layers|resampler_depth"
    r"|num_timestamp_prediction_layers|num_layers_per_stack|\w*num_hidden_layers|parcae_num_coda_layers|c2f_num_blocks)$"
)

# (pattern, size): whole numbers. a value that is smaller already is left alone
SIZES: tuple[tuple[str, int], ...] = (
    (r"(^|_)position_embedding_size$|num_position_embeddings$|pos_emb_(height|width)$", 64),
    (r"chunk_size_feed_forward|type_vocab_size|num_labels", 1 << 60),
    (
        r"(^|_)(vocab_size|vocabulary_size)(_|$)|codebook_size|hash_byte_group_vocab|num_embeddings$|num_centroids",
        VOCAB,
    ),
    (r"num_hash_buckets|(^|_)n_words$|num_codevectors_per_group", 64),
    # heads
    (r"(key_value|kv|query_group)\w*(heads|groups)$|linear_num_key_heads|num_kv$", KEY_VALUE_HEADS),
    (r"index_n_heads", 2),
    (r"mamba_n_heads|mamba_num_heads", 8),
    (r"(^|_)(n_|num_)?(attention_)?heads$|^n_head$|^num_heads$|\w*attention_heads$|resampler_n_heads", HEADS),
    (r"mamba_(d_head|head_dim)$", 16),
    (r"qk_rope_head_dim|rotary_dim$", 8),
    (r"qk_nope_head_dim", 16),
    (r"qk_head_dim$", 24),
    (r"v_head_dim$", 12),
    (r"index_head_dim$", 16),
    (r"head_dim$|^d_kv$|^d_head$|kv_channels|dim_head$|attention_head_size|head_size$", HEAD_DIM),
    (r"kv_lora_rank|q_lora_rank|o_lora_rank|(_|^)rank$|laurel_rank|time_step_rank|dt_rank", 16),
    # experts
    (r"zero_expert_num", 2),
    (r"num_experts$|n_routed_experts|num_local_experts|moe_num_experts|n_experts|^num_expert$", 4),
    (r"(experts|expert)_per_tok(en)?$|moe_top_?k$|^top_k(_experts)?$|moe_k$|num_selected_experts|num_activated", 2),
    (r"^(n_group|num_expert_groups?|n_groups)$", 2),
    (r"topk_group", 1),
    (r"index_top_?k", 4),
    (r"expert_capacity", 64),
    # where a kind of layer starts, and how often it comes
    (r"first_k_dense_replace|num_dense_layers|layer_start_index", 1),
    (
        r"(_period|_interval|_pattern|_every_n_layers|sparse_step|_frequency|layer_group_size|interleave_moe_layer_step)$",
        2,
    ),
    (r"(attn|expert)_layer_offset", 1),
    # windows
    (r"sliding_window(_size)?$|local_attention$|local_window\w*$|keep_window_size", 6),
    (r"attention_window$", 8),
    (r"^window_size$", 4),
    (r"attention_chunk_size$", 8),
    (r"chunk_size$|^block_size$", 8),
    # lengths
    (r"mask_(time|feature)_length$", 2),
    (r"max_2d_position_embeddings", 1024),
    (r"max_source_positions", 32),
    (r"max_target_positions|max_(en|de)coder_position_embeddings|max_length$|max_text_len\w*|model_max_length", 64),
    (
        r"(^|_)(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|seq_length|max_seq_length)$",
        64,
    ),
    (r"context_length$|max_ep_len|max_positions?$|local_transformer_stride", 64),
    (r"num_(object_)?queries$|num_query_tokens|query_num$|(resampler_)?n(um)?_latents(_2d)?$", 8),
    (r"num_denoising$|num_proposals$|num_negatives", 4),
    # images and sound
    (r"^(image_size|img_size|max_img_size|max_image_size|pretrain_image_size|spec_size|input_image_size)$", 32),
    (r"^patch_size$", 8),
    (r"^n_window$", 8),
    (r"^n_window_infer$", 32),
    (r"input_feat_per_channel|num_mel_bins|n_mel_bins|n_mels|input_feat_size|mel_dim|num_mel_features", 16),
    (r"mm_tokens_per_image", 4),
    (r"num_frames$", 2),
    (r"temporal_patch_size", 2),
    # widths: the longest list. A field that no row matches keeps its value
    (r"moe_intermediate_size|moe_ffn\w*|expert_ffn_hidden_size|shared_expert\w*size|moe_\w*intermediate_size", 24),
    (r"intermediate_\w*(size|dim)$|_ffn_dim$|^ffn_dim$|^d_ff$|^dff$|^dim_ff$|^mlp_dim$|^d_inner$|^n_inner$", 96),
    (
        r"ffn_hidden_size|feed_?forward\w*(dim|size)$|dim_feedforward|linear_units$|mlp_hidden_size|intermediate_size_mlp",
        96,
    ),
    (r"(projector|resampler|aligner|merger)\w*(size|dim)s?$", WIDTH),
    (r"hidden_(size|dim)\w*$|^d_model$|^n_embd$|^(emb|embed|embedding|embeddings|channel)_(dim|size)$|^dim$", WIDTH),
    (
        r"(word_embed_)?proj(ect(ion)?)?_(dim|size)$|(^|_)project_dim$|pooler_output_size|output_dim$|adapter_out_dim",
        WIDTH,
    ),
    (r"(^|_)output_(proj_)?dims?$|mm_embed_dim|text_embed_dim|(^|_)embed_dims?$|hidden_units$|d_embed$", WIDTH),
    (r"classifier_proj_size|codevector_dim|xvector_output_dim|(in|out)_hidden_size|attention_head_dim", WIDTH),
    (
        r"entity_emb_size|visual_feat_dim|descriptor_dim|unit_embed_dim|lang_embed_dim|spkr_embed_dim|feature_size",
        WIDTH,
    ),
    (
        r"output_channels$|fusion_hidden_size|mask_feature_size|neck_out_channels|(^|_)embedding_dimension$|latent_dim",
        WIDTH,
    ),
    (r"conv_channels$|upsample_initial_channel|predictor_channels|postnet_units|base_channels|scale_channels", WIDTH),
    (r"state_size$|mamba_d_state$|ssm_state_size$|linear_\w*head_dim$", 16),
    (r"num_conv_pos_embeddings$", 16),
    (r"num_conv_pos_embedding_groups$", 4),
    (r"num_codebooks$|num_quantizers$|n_codebooks$", 4),
    (r"(entity_vocab_size|num_object_labels|num_attr_labels|num_qa_labels)$", 32),
)
_SIZES = tuple((re.compile(pattern), size) for pattern, size in SIZES)

# probabilities that are zero, except in the mode that turns dropout on
DROPOUT = re.compile(
    r"dropout|_pdrop$|^pdrop$|drop_path|dropout_rate|_dropout_prob|^drop_rate|attention_drop_rate|_drop$"
)
# probabilities of leaving out parts of a model: they stay zero, or the number of layers would change
SKIPPED = re.compile(r"layerdrop|layer_dropout|expert_dropout|token_dropout|classifier_dropout")
# tokens with a meaning
TOKEN = re.compile(
    r"(_token_id|_token_index|_token_ids|_start_id|_end_id|_newline_id|_stream_(bos|eos)_id|_id_token|_pad_id|unk_index|mask_index)$"
)


def size_of(name: str, value: int) -> int:
    """The size that a field is given: its own where no row fits, and where that is smaller already."""
    for pattern, size in _SIZES:
        if pattern.search(name):
            return min(value, size)
    return value


# lists with one entry for each stage of a pyramid, or each convolution of a sound's front end
FRONT_END = re.compile(r"^conv_(dim|stride|kernel)$")
DEPTHS = re.compile(
    r"^(depths?|num_block_repeats|stage_num_blocks|layer_depths|block_sizes|blocks_per_stage|encoder_depths|num_blocks)$"
)
CHANNELS = re.compile(
    r"(hidden_sizes|embed_dims?|embed_dim|_dims|^dims|_channels|hidden_dims|feature_dims|conv_dims|tdnn_dim|channels)$"
)


def list_of(name: str, value: Any) -> Any:
    """A shorter or narrower list; None where it stays."""
    if FRONT_END.match(name):
        return type(value)(min(x, 32) for x in value[:3])
    if DEPTHS.match(name):
        return type(value)(min(x, 2) for x in value)
    if CHANNELS.search(name) and not name.startswith(("stage_", "stem_", "in_", "out_")):
        # the result is a list even if the default is a tuple, because some models add lists to it
        return _narrow(value)
    return None


def _narrow(value: Any) -> Any:
    """All entries divided by the largest number that leaves multiples of eight."""
    for factor in (16, 8, 4, 2):
        if all(x % factor == 0 and x // factor >= 8 and x // factor % 4 == 0 for x in value):
            return [x // factor for x in value]
    return list(value)
