"""The tiny model of `vision_language_lora.py`."""

from pathlib import Path

import tiny
import torch
from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

WORDS = ["<image>", *"0123456789", "Which", "digit", "is", "this", "?"]


def save(folder: Path) -> str:
    """Saves a SmolVLM of two layers in the tower and two behind it, and its tokenizer. A picture becomes 16 tokens."""
    torch.manual_seed(0)
    words = tiny.tokenizer()
    words.add_tokens(WORDS)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 192}
    text = {"model_type": "llama", "vocab_size": len(words), "num_key_value_heads": 2, "pad_token_id": 0, **sizes}
    # a head with smaller weights than these could not be sure of a digit
    text["initializer_range"] = 0.2
    tower = {"image_size": 64, "patch_size": 8, **sizes}
    image = words.convert_tokens_to_ids("<image>")
    config = SmolVLMConfig(text_config=text, vision_config=tower, scale_factor=2, image_token_id=image)
    SmolVLMForConditionalGeneration(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return str(folder)
