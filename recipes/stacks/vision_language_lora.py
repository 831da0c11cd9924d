"""LoRA of a vision-language model: the tower for the pixels stays frozen, the language part gets adapters.

    python recipes/stacks/vision_language_lora.py
    python recipes/stacks/vision_language_lora.py --model HuggingFaceTB/SmolVLM-256M-Instruct --batch-size 8

For models of the kinds SmolVLM and Idefics3. The pictures are scikit-learn's handwritten digits, the model is asked
which digit it sees, and the loss is that of its answer. A training of your own has its batches from the processor
(`AutoProcessor`), which also cuts large pictures into tiles and writes the model's own tokens around them.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator

import tiny
import torch
from peft import LoraConfig, get_peft_model
from sklearn.datasets import load_digits
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText, AutoTokenizer

from hf_actcompress import kept_bytes, patch_model

QUESTION = "Which digit is this ?"
# the tower's attention has layers of the same names
TARGETS = r".*\.text_model\..*\.(q_proj|k_proj|v_proj|o_proj)"


def picture_tokens(config) -> int:
    """How many tokens of the language part a picture becomes."""
    return (config.vision_config.image_size // config.vision_config.patch_size // config.scale_factor) ** 2


def batches(args: Namespace, config) -> Iterator[dict[str, torch.Tensor]]:
    """One picture in each row: its placeholders, the question, and the digit, which alone has a label."""
    words = AutoTokenizer.from_pretrained(args.model)
    question = words(QUESTION, add_special_tokens=False).input_ids
    start = torch.tensor([config.image_token_id] * picture_tokens(config) + question)
    answers = torch.tensor(words.convert_tokens_to_ids(list("0123456789")))
    digits = load_digits()
    for step in range(args.steps):
        rows = torch.arange(step * args.batch_size, (step + 1) * args.batch_size) % len(digits.images)
        pixels = torch.from_numpy(digits.images[rows]).float()[:, None] / 8 - 1
        pixels = F.interpolate(pixels, size=(config.vision_config.image_size,) * 2, mode="bilinear")
        answer = answers[torch.from_numpy(digits.target[rows])][:, None]
        ids = torch.cat((start.expand(len(rows), -1), answer), 1)
        labels = torch.cat((torch.full_like(ids[:, 1:], -100), answer), 1)
        # [rows, pictures in a row, channels, height, width]
        pixels = pixels[:, None].expand(-1, -1, 3, -1, -1)
        yield {"input_ids": ids, "labels": labels, "pixel_values": pixels, "attention_mask": torch.ones_like(ids)}


def train(args: Namespace) -> tuple[list[float], int]:
    """The loss of each step, and the bytes that a batch keeps for backward."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForImageTextToText.from_pretrained(args.model, dtype=torch.float32).to(device)
    config = model.config
    if not args.stock:
        patch_model(model, args.preset)  # the only line that is new
    model = get_peft_model(model, LoraConfig(r=8, target_modules=TARGETS)).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for batch in batches(args, config):
        batch = {name: x.to(device) for name, x in batch.items()}

        def forward(batch=batch) -> torch.Tensor:
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                return model(**batch).loss

        loss = forward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, kept_bytes(forward, device)


def main(argv: list[str] | None = None) -> int:
    tiny.report(*train(tiny.parse(__doc__, argv, "smolvlm")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
