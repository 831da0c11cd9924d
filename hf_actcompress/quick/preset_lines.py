"""What each preset is, in a line, and the names that a plan knows. It imports no torch; tests hold it to those."""

from __future__ import annotations

PRESET_LINES: dict[str, str] = {
    "exact": "exact: recomputes what is cheap, in backward; the default",
    "long": "exact: also computes MLPs and logits in tiles, for long contexts",
    "int8": "lossy: stores activations in 8 bits",
    "int4": "lossy: the residual stream and MLPs in 4 bits, attention in 8",
    "int4_attention": "lossy: attention in 5 bits as well, and recomputed",
    "adaptive": "lossy: where `calibrate` starts to choose bits per layer",
    "fp8": "lossy: stores activations as float8",
    "offload": "exact: moves kept activations to host memory",
    "tempo": "lossy: activations and norms from their rounded outputs (Tempo)",
    "inverted": "lossy: activations from their rounded outputs (inverted)",
    "fewbit": "lossy: derivatives of activations in 3 bits (few-bit)",
    "forward_ad": "lossy: keeps rounded derivatives of activations (forward mode)",
    "actnn": "lossy: 2 bits for linear layers and activations (ActNN)",
    "mesa": "lossy: 8 bits with running scales (Mesa)",
    "gact": "lossy: bits by measured sensitivity (GACT)",
    "dropit": "lossy: the largest 10% of each linear input (DropIT)",
    "blocksparse": "lossy: 30% of the blocks of each linear input",
    "pooled": "lossy: linear inputs averaged over pairs of tokens",
    "sampled": "lossy: 30% of the tokens of each linear input, sampled",
    "wtacrs": "lossy: the same, weighted by gradient norms (WTA-CRS)",
}

# what `plan` may allow besides exact, and what it may look for
PLAN_OPTIONS = (
    "exact", "int8", "fp8", "int4", "offload", "checkpoint", "checkpoint_with_attention", "compressed_checkpoint",
    "offloaded_checkpoint", "tiles",
)  # fmt: skip
OBJECTIVES = ("fidelity", "speed")
