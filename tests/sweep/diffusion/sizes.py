"""Tiny sizes of a class's arguments: rows of (pattern of the argument's name, size). The first that matches decides."""

from __future__ import annotations

import re
from typing import Any

from .classes import parameters

WIDTH = 64
HEADS = 4
HEAD = 16
TEXT = 32
CHANNELS = 8

SIZES: tuple[tuple[str, Any], ...] = (
    (r"^(audio_|text_)?(num_)?(key_value|kv)_(attention_)?heads$|^num_key_value_attention_heads$|n_kv_heads", 2),
    (r"(^|_)(num_|n_?|dit_)?(attention_)?heads$|^face_encoder_num_heads$|(^|_)num_heads$", HEADS),
    (r"head_dim$", HEAD),
    (r"(^|_)(num|n|depth)_?(\w+_)?(layers|blocks)$|^nlayers$|^(dit_)?depth$|^mmdit_layers$|approximator_layers", 2),
    (r"^caption_projection_dim$|^cross_attention_dim$|^audio_cross_attention_dim$", WIDTH),
    (r"ffn?_(hidden_size|dim)$|intermediate_(size|dim)$|^ff_(inner_)?dim", 2 * WIDTH),
    (r"^(hidden_size|dim|model_dim|embed_dim|dit_dim|token_dim|d_model|embedding_dim)$", WIDTH),
    (r"(text|caption|cap_feat|pooled|joint|llm|context_in|image|encoder_hid|clip|condition|conditioning)\w*"
     r"(dim|dim2|channels|size)$|^joint_attention_dim$|global_states_input_dim|^cond_token_dim$|^dit_text_dim$", TEXT),
    (r"(freq|time|timestep|sin|fourier|adaln|approximator)\w*(dim|channels|features)\w*$", TEXT),
    (r"(^|_)(in|out|io|latent)_?(channels?|visual_dim|audio_dim|dim)$", CHANNELS),
    (r"vocab_size|codebook_size", 128),
    (r"axes_dims?(_rope)?$|rope_axes_dim$|rope_dim(_list)?$|mrope_section", "axes"),
    (r"axes_lens$", "lengths"),
)  # fmt: skip
_SIZES = tuple((re.compile(pattern), size) for pattern, size in SIZES)
# one head's width divided among the axes of a rotation
_AXES = {2: (8, 8), 3: (4, 6, 6), 4: (4, 4, 4, 4)}


def tiny(cls: Any, changed: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the class that do not keep their defaults: what a row makes smaller, and what is asked for."""
    given = parameters(cls.__init__)
    sizes = {name: _size_of(name, default) for name, default in given.items()}
    return {**{name: size for name, size in sizes.items() if size is not None}, **changed}


def _size_of(name: str, default: Any) -> Any:
    """The size that an argument is given; None where it stays."""
    size = next((size for pattern, size in _SIZES if pattern.search(name)), None)
    if size == "axes" and isinstance(default, (tuple, list)):
        return _AXES.get(len(default))
    if size == "lengths" and isinstance(default, (tuple, list)):
        return (64,) * len(default)
    if type(default) is int and type(size) is int:
        return min(default, size)
    return None
