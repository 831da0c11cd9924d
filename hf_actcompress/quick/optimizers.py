"""Names of optimizers."""

from __future__ import annotations

# torch's AdamW that is not fused: its states are those of the fused one, its step allocates more
FOREACH = "adamw_foreach"
# names of transformers' `TrainingArguments(optim=...)`; a paged one keeps the same, but may move it to the host
OF_TRAINER = {
    "adamw_torch": FOREACH, "adamw_torch_fused": "adamw", "adamw_hf": FOREACH, "adamw_apex_fused": "adamw",
    "paged_adamw_32bit": "adamw", "paged_adamw": "adamw",
    "adamw_bnb_8bit": "adamw_8bit", "paged_adamw_8bit": "adamw_8bit",
}  # fmt: skip
