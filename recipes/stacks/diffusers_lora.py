"""LoRA of a diffusion transformer of diffusers: `patch_model` stands behind `add_adapter`, or before it.

    python recipes/stacks/diffusers_lora.py
    python recipes/stacks/diffusers_lora.py --model black-forest-labs/FLUX.1-dev --batch-size 1

The loop is that of diffusers' own example: noise is mixed into latents, and the model learns the direction back. By
default the latents are scikit-learn's handwritten digits; a training of your own has the latents of pictures and the
states of their captions, as the pipeline's VAE and text encoders make them.
"""

import sys
from argparse import Namespace

import tiny
import torch
from diffusers import FluxTransformer2DModel
from peft import LoraConfig
from sklearn.datasets import load_digits
from torch.nn import functional as F

from hf_actcompress import kept_bytes, patch_model

TEXT_TOKENS = 32


def batches(args: Namespace, config):
    """Latents [B, 256, C] of digits, whose values are repeated over the channels, and states of their captions."""
    pictures = torch.from_numpy(load_digits().images).float()[: args.steps * args.batch_size] / 8 - 1
    latents = F.interpolate(pictures[:, None], size=(16, 16)).flatten(2).transpose(1, 2)
    for part in latents.split(args.batch_size):
        captions = torch.randn(len(part), TEXT_TOKENS, config.joint_attention_dim)
        yield part.repeat(1, 1, config.in_channels), captions, torch.randn(len(part), config.pooled_projection_dim)


def inputs(noisy: torch.Tensor, captions: torch.Tensor, pooled: torch.Tensor, times: torch.Tensor, config) -> dict:
    side = round(noisy.shape[1] ** 0.5)
    places = torch.zeros(noisy.shape[1], 3)
    places[:, 1:] = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    guidance = torch.ones_like(times) if config.guidance_embeds else None
    return {
        "hidden_states": noisy, "encoder_hidden_states": captions, "pooled_projections": pooled, "timestep": times,
        "img_ids": places, "txt_ids": torch.zeros(TEXT_TOKENS, 3), "guidance": guidance,
    }  # fmt: skip


def train(args: Namespace) -> tuple[list[float], int]:
    """The loss of each step, and the bytes that a batch keeps for backward."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = FluxTransformer2DModel.from_pretrained(args.model, subfolder="transformer").to(device).train()
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    if not args.stock:
        patch_model(model, args.preset)  # the only line that is new
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for latents, captions, pooled in batches(args, model.config):
        noise, times = torch.randn_like(latents), torch.rand(len(latents)).sigmoid()
        noisy = torch.lerp(latents, noise, times[:, None, None])
        batch = inputs(noisy, captions, pooled, times, model.config)
        batch = {name: x if x is None else x.to(device) for name, x in batch.items()}

        goal = (noise - latents).to(device)

        def forward(batch=batch, goal=goal) -> torch.Tensor:
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                return F.mse_loss(model(**batch, return_dict=False)[0].float(), goal)

        loss = forward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, kept_bytes(forward, device)


def main(argv: list[str] | None = None) -> int:
    tiny.report(*train(tiny.parse(__doc__, argv, "flux")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
