"""Names of optimizers."""

from __future__ import annotations

# torch's AdamW that is not fused: its states are those of the fused one, its step allocates more
FOREACH = "adamw_foreach"
# names of transformers' `TrainingArguments(optim=...)`; a paged one keeps the same, but may move it to the host.
# bitsandbytes and apex keep fp32 moments of weights of any dtype
OF_TRAINER = {
    "adamw_torch": FOREACH, "adamw_torch_fused": "adamw", "adamw_hf": FOREACH, "adamw_apex_fused": "adamw_32bit",
    "paged_adamw_32bit": "adamw_32bit", "paged_adamw": "adamw_32bit",
    "adamw_bnb_8bit": "adamw_8bit", "paged_adamw_8bit": "adamw_8bit",
    "paged_lion_32bit": "lion_32bit", "paged_lion_8bit": "lion_8bit", "rmsprop_bnb": "rmsprop_32bit",
    "rmsprop_bnb_32bit": "rmsprop_32bit", "rmsprop_bnb_8bit": "rmsprop_8bit", "ademamix": "ademamix_32bit",
    "paged_ademamix_32bit": "ademamix_32bit", "paged_ademamix_8bit": "ademamix_8bit",
}  # fmt: skip
