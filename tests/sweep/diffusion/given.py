"""The inputs of a class that no row of `inputs.py` gives, or gives wrongly; None leaves one out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache
from torch import Tensor

from . import controls
from .inputs import FRAMES, ROWS, SIDE, WORDS, noise, ones
from .sizes import CHANNELS, HEAD, TEXT, WIDTH

Config = Mapping[str, Any]
# tokens of a video in patches of 1 x 2 x 2
PATCHES = FRAMES * SIDE * SIDE // 4
_VIDEO = (FRAMES, SIDE // 2, SIDE // 2)


def grid(*sides: int) -> Tensor:
    """The place of each point, [points, sides]."""
    return torch.cartesian_prod(*(torch.arange(side) for side in sides))


def rotation(*shape: int) -> tuple[Tensor, Tensor]:
    angles = noise(*shape)
    return angles.cos(), angles.sin()


def frames_first(config: Config) -> dict[str, Any]:
    return {"hidden_states": noise(ROWS, FRAMES, config["in_channels"], SIDE, SIDE)}


def _of_pictures_and_text(config: Config) -> dict[str, Any]:
    """A sequence of words, and of a picture's tokens behind them."""
    count, picture = WORDS + 64, [[1, i, j] for i in range(8) for j in range(8)]
    places = torch.tensor([[0, i, i] for i in range(WORDS)] + picture)
    kinds = torch.tensor([3] * WORDS + [2] * 64)
    return {
        "hidden_states": noise(ROWS, count, config["in_channels"]), "encoder_hidden_states": noise(ROWS, count, TEXT),
        "position_ids": places.expand(ROWS, count, 3), "segment_ids": torch.zeros(ROWS, count, dtype=torch.long),
        "indicator": kinds.expand(ROWS, count),
    }  # fmt: skip


def _of_video_sound_and_text(config: Config) -> dict[str, Any]:
    """A sequence of words, of a video's patches and of a sound, in this order."""
    words, video, sound = torch.arange(WORDS), WORDS + torch.arange(PATCHES), WORDS + PATCHES + torch.arange(16)
    count = WORDS + PATCHES + 16
    return {
        "hidden_states": noise(ROWS, PATCHES, 4 * config["in_channels"]),
        "audio_hidden_states": noise(ROWS, 16, config["audio_in_channels"]), "timestep": torch.tensor([0.3]),
        "timestep_indices": torch.zeros(count, dtype=torch.long),
        "position_ids": torch.arange(count)[:, None].expand(-1, 3),
        "token_tags": torch.tensor([0] * WORDS + [1] * PATCHES + [2] * 16),
        "text_indices": words, "video_indices": video, "audio_indices": sound,
    }  # fmt: skip


def _of_words_and_pictures(config: Config) -> dict[str, Any]:
    """One sequence of words and of a picture's patches, which is what an omni model of text and pictures reads."""
    count = WORDS + 64
    picture = WORDS + torch.arange(64)
    return {
        "input_ids": torch.arange(WORDS), "text_indexes": torch.arange(WORDS), "und_len": WORDS,
        "position_ids": torch.arange(count).expand(3, count), "sequence_length": count,
        "vision_tokens": [noise(1, config["latent_channel"], 1, SIDE, SIDE)], "vision_token_shapes": [(1, 8, 8)],
        "vision_sequence_indexes": picture, "vision_mse_loss_indexes": picture,
        "vision_timesteps": torch.full((64,), 300.0),
        "vision_noisy_frame_indexes": [torch.tensor([0])],
    }  # fmt: skip


def _sound_beside(config: Config) -> dict[str, Any]:
    """A video's tokens and a sound's, each with a caption."""
    return {
        "hidden_states": noise(ROWS, FRAMES * 64, config["in_channels"]), "num_frames": FRAMES, "height": 8, "width": 8,
        "audio_hidden_states": noise(ROWS, 16, config["audio_in_channels"]), "audio_num_frames": 16,
        "audio_encoder_hidden_states": noise(ROWS, WORDS, TEXT, seed=3),
        "audio_encoder_attention_mask": ones(ROWS, WORDS),
        "timestep": torch.tensor([[0.3], [0.7]]), "sigma": torch.tensor([0.3, 0.7]),
    }  # fmt: skip


def _tokens_of_a_video(config: Config) -> dict[str, Any]:
    return {
        "hidden_states": noise(ROWS, FRAMES * 64, config["in_channels"]),
        "num_frames": FRAMES,
        "height": 8,
        "width": 8,
    }


def _words_and_a_picture_to_be(config: Config) -> dict[str, Any]:
    count = WORDS + 1 + SIDE * SIDE // 4
    return {
        "input_ids": torch.arange(ROWS * WORDS).view(ROWS, WORDS), "input_img_latents": [], "input_image_sizes": {},
        "attention_mask": torch.ones(ROWS, count, count), "position_ids": torch.arange(count).expand(ROWS, count),
    }  # fmt: skip


def _of_a_unet_of_videos(config: Config) -> dict[str, Any]:
    return {"sample": noise(ROWS, 4, FRAMES, SIDE, SIDE), "encoder_hidden_states": noise(ROWS, WORDS, WIDTH)}


INPUTS: dict[str, Callable[[Config], dict[str, Any]]] = {
    "AceStepTransformer1DModel": lambda c: {
        "hidden_states": noise(ROWS, 64, CHANNELS), "context_latents": noise(ROWS, 64, 2 * CHANNELS),
    },
    "AnyFlowTransformer3DModel": lambda c: {
        **frames_first(c), "timestep": torch.tensor([[0.3, 0.3], [0.7, 0.7]]),
        "r_timestep": torch.tensor([[0.1, 0.1], [0.2, 0.2]]),
    },
    "BriaFibo2Transformer2DModel": lambda c: {
        "encoder_hidden_states": noise(ROWS, 2, WORDS, TEXT), "encoder_attention_mask": ones(ROWS, WORDS).bool(),
    },
    "BriaFiboTransformer2DModel": lambda c: {
        "text_encoder_layers": [noise(ROWS, WORDS, TEXT, seed=i) for i in range(4)],
    },
    "CogVideoXTransformer3DModel": frames_first,
    "ConsisIDTransformer3DModel": frames_first,
    "Cosmos3OmniTransformer": _of_words_and_pictures,
    "ErnieImageTransformer2DModel": lambda c: {
        "text_bth": noise(ROWS, WORDS, TEXT), "text_lens": torch.tensor([WORDS, WORDS - 4]),
    },
    "GlmImageTransformer2DModel": lambda c: {
        "prior_token_id": torch.arange(ROWS * 64).view(ROWS, 64),
        "prior_token_drop": torch.zeros(ROWS, 64, dtype=torch.bool),
    },
    "HiDreamImageTransformer2DModel": lambda c: {
        "kind": "picture", "img_ids": None, "pooled_embeds": noise(ROWS, TEXT),
        "encoder_hidden_states_t5": noise(ROWS, WORDS, TEXT),
        "encoder_hidden_states_llama3": noise(2, ROWS, WORDS, TEXT),
    },
    "HunyuanDiT2DModel": lambda c: {
        "encoder_hidden_states_t5": noise(ROWS, WORDS, TEXT, seed=3), "text_embedding_mask": ones(ROWS, WORDS),
        "text_embedding_mask_t5": ones(ROWS, WORDS), "image_rotary_emb": rotation(64, HEAD),
    },
    "HunyuanVideo15Transformer3DModel": lambda c: {
        "encoder_hidden_states_2": noise(ROWS, WORDS, TEXT, seed=3), "encoder_attention_mask_2": ones(ROWS, WORDS),
        "image_embeds": noise(ROWS, 4, TEXT),
    },
    "HunyuanVideoFramepackTransformer3DModel": lambda c: {
        "image_embeds": noise(ROWS, 4, TEXT), "indices_latents": torch.arange(FRAMES),
        "latents_clean": noise(ROWS, c["in_channels"], 1, SIDE, SIDE),
        "indices_latents_clean": torch.zeros(1),
        "latents_history_2x": noise(ROWS, c["in_channels"], 1, SIDE, SIDE),
        "indices_latents_history_2x": torch.zeros(1),
        "latents_history_4x": noise(ROWS, c["in_channels"], 4, SIDE, SIDE),
        "indices_latents_history_4x": torch.arange(4),
    },
    "Ideogram4Transformer2DModel": _of_pictures_and_text,
    "JoyImageEditPlusTransformer3DModel": lambda c: {
        "hidden_states": noise(ROWS, 64, c["in_channels"], 1, 2, 2), "shape_list": [[(1, 8, 8)]] * ROWS,
    },
    "Kandinsky5Transformer3DModel": lambda c: {
        "hidden_states": noise(ROWS, FRAMES, SIDE, SIDE, c["in_visual_dim"]), "text_rope_pos": torch.arange(WORDS),
        "encoder_hidden_states": noise(ROWS, WORDS, TEXT),
        "visual_rope_pos": [torch.arange(side) for side in _VIDEO],
    },
    "Kandinsky6Transformer3DModel": lambda c: {
        "hidden_states": noise(ROWS, FRAMES, SIDE, SIDE, 2 * c["in_visual_dim"] + 1), "encoder_attention_mask": None,
        "encoder_hidden_states": noise(ROWS, WORDS, TEXT), "audio_hidden_states": noise(ROWS, 16, c["in_audio_dim"]),
    },
    "Krea2Transformer2DModel": lambda c: {
        "hidden_states": noise(ROWS, 64, c["in_channels"]),
        "position_ids": torch.cat((torch.zeros(WORDS, 3), grid(1, 8, 8))),
        "encoder_hidden_states": noise(ROWS, WORDS, c["num_text_layers"], TEXT), "encoder_attention_mask": None,
    },
    "LTX2VideoTransformer3DModel": _sound_beside,
    "LTXVideoTransformer3DModel": _tokens_of_a_video,
    "LatteTransformer3DModel": lambda c: {"encoder_attention_mask": None},
    "LongCatAudioDiTTransformer": lambda c: {
        "hidden_states": noise(ROWS, 64, c["latent_dim"]), "latent_cond": noise(ROWS, 64, c["latent_dim"]),
    },
    "LuminaNextDiT2DModel": lambda c: {
        "encoder_mask": ones(ROWS, WORDS), "image_rotary_emb": torch.polar(torch.ones(64, 64, 8), noise(64, 64, 8)),
        "cross_attention_kwargs": {},
    },
    "MiniMaxH3Transformer3DModel": _of_video_sound_and_text,
    "MiniMaxMusic3RVQDepthDecoder": lambda c: {"inputs_embeds": noise(ROWS, 8, WIDTH)},
    "MiniMaxMusic3Transformer1DModel": lambda c: {"encoder_hidden_states": noise(ROWS, 8 * SIDE, TEXT)},
    "OmniGenTransformer2DModel": _words_and_a_picture_to_be,
    "PriorTransformer": lambda c: {
        "hidden_states": noise(ROWS, TEXT), "proj_embedding": noise(ROWS, TEXT, seed=3),
        "attention_mask": ones(ROWS, WORDS),
    },
    "QwenImage21Transformer2DModel": lambda c: {
        "img_mask": (torch.arange(WORDS + 64) >= WORDS).expand(ROWS, WORDS + 64),
    },
    "RFD4ProteinaTransformer": lambda c: {
        "bb_ca": noise(ROWS, WORDS, 3), "local_latents": noise(ROWS, WORDS, c["latent_dim"]),
        "bb_ca_time": torch.tensor([0.3, 0.7]), "local_latents_time": torch.tensor([0.3, 0.7]),
        "padding_mask": ones(ROWS, WORDS).bool(), "conditioning": {
            "is_in_context_conditioning": torch.zeros(ROWS, WORDS), "supports_local_latent": torch.ones(ROWS, WORDS),
        },
    },
    "SanaWMLTX2RefinerTransformer3DModel": lambda c: {
        "hidden_states": noise(ROWS, 64, c["in_channels"]), "video_rotary_emb": rotation(ROWS, 64, WIDTH),
        "timestep": torch.tensor([[0.3], [0.7]]),
    },
    "SanaWMTransformer3DModel": lambda c: {
        "timestep": torch.tensor([[[300.0] * FRAMES], [[700.0] * FRAMES]]),
        "encoder_hidden_states": noise(ROWS, 1, WORDS, TEXT),
    },
    "StableAudio3DiTModel": lambda c: {
        "hidden_states": noise(ROWS, c["io_channels"], 64), "global_hidden_states": noise(ROWS, c["global_cond_dim"]),
    },
    "StableAudioDiTModel": lambda c: {
        "hidden_states": noise(ROWS, c["in_channels"], 64),
        "global_hidden_states": noise(ROWS, 1, c["global_states_input_dim"]),
        "rotary_embedding": rotation(65, HEAD // 2), "encoder_attention_mask": None,
        "encoder_hidden_states": noise(ROWS, WORDS, TEXT),
    },
    "T5FilmDecoder": lambda c: {
        "encodings_and_masks": [(noise(ROWS, WORDS, WIDTH), torch.ones(ROWS, WORDS))],
        "decoder_input_tokens": noise(ROWS, 64, c["input_dims"]), "decoder_noise_time": torch.tensor([0.3, 0.7]),
    },
    "TransformerTemporalModel": lambda c: {
        "hidden_states": noise(8, c["in_channels"], SIDE, SIDE), "num_frames": 8, "encoder_hidden_states": None,
    },
    "I2VGenXLUNet": lambda c: {
        **_of_a_unet_of_videos(c), "fps": torch.tensor([8, 8]),
        "image_latents": noise(ROWS, 4, FRAMES, SIDE, SIDE, seed=3), "image_embeddings": noise(ROWS, WIDTH),
    },
    "Kandinsky3UNet": lambda c: {
        "sample": noise(ROWS, 4, SIDE, SIDE), "encoder_hidden_states": noise(ROWS, WORDS, TEXT),
        "encoder_attention_mask": ones(ROWS, WORDS),
    },
    "StableCascadeUNet": lambda c: {
        "timestep_ratio": torch.tensor([0.3, 0.7]), "clip_text_pooled": noise(ROWS, 1, TEXT),
        "clip_text": noise(ROWS, WORDS, TEXT),
    },
    "UNet1DModel": lambda c: {"sample": noise(ROWS, 2, 64)},
    "UNet3DConditionModel": _of_a_unet_of_videos,
    "UNetMotionModel": lambda c: {
        **_of_a_unet_of_videos(c), "encoder_hidden_states": noise(ROWS * FRAMES, WORDS, WIDTH),
    },
    "UNetSpatioTemporalConditionModel": lambda c: {
        "sample": noise(ROWS, FRAMES, 8, SIDE, SIDE), "encoder_hidden_states": noise(ROWS, 1, WIDTH),
        "added_time_ids": torch.tensor([[6.0, 127.0, 0.02]] * ROWS),
    },
    "UVit2DModel": lambda c: {
        "input_ids": torch.arange(ROWS * 64).view(ROWS, 8, 8) % 100, "encoder_hidden_states": noise(ROWS, WORDS, TEXT),
        "pooled_text_emb": noise(ROWS, TEXT), "micro_conds": torch.tensor([[512.0, 512.0, 0.0, 0.0, 6.0]] * ROWS),
    },
    "WanAnimate2Transformer3DModel": lambda c: {
        "condition_latents": noise(ROWS, CHANNELS, FRAMES, SIDE, SIDE, seed=3), "seq_len": PATCHES,
        "hidden_states": noise(ROWS, CHANNELS, FRAMES, SIDE, SIDE), "kv_cache_mode": "extract",
        "kv_cache": WanAnimate2KVCache(c["num_layers"]), "offset_grid_sizes": torch.tensor([_VIDEO] * ROWS),
    },
    "WanAnimateTransformer3DModel": lambda c: {
        "pose_hidden_states": noise(ROWS, c["latent_channels"], FRAMES - 1, SIDE, SIDE),
        "face_pixel_values": noise(ROWS, 3, 1, 16, 16),
    },
    "WanVACETransformer3DModel": lambda c: {
        "control_hidden_states": noise(ROWS, c["vace_in_channels"], FRAMES, SIDE, SIDE),
    },
    "ZImageTransformer2DModel": lambda c: {
        "x": [noise(c["in_channels"], 1, SIDE, SIDE, seed=i) for i in range(ROWS)],
        "t": torch.tensor([0.3, 0.7]), "cap_feats": [noise(WORDS, TEXT, seed=i) for i in range(ROWS)],
    },
}  # fmt: skip
INPUTS |= controls.INPUTS
