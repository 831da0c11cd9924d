"""TRL's SFTTrainer with QLoRA: weights in 4 bits, adapters in bf16, and a patched model, on one card of 24 GB.

    python recipes/stacks/trl_sft_qlora.py
    python recipes/stacks/trl_sft_qlora.py --model meta-llama/Llama-3.1-8B --batch-size 2 --seq-len 2048

Before any weight is loaded `estimate` says from the model's config what the training needs. Needs bitsandbytes, trl.
"""

import sys
from argparse import Namespace

import tiny
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, set_seed
from trl import SFTConfig, SFTTrainer

from hf_actcompress import estimate, kept_bytes, patch_model

LORA = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
NF4 = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)


def training_arguments(args: Namespace) -> SFTConfig:
    gpu = torch.cuda.is_available()
    return SFTConfig(
        output_dir=str(args.output_dir),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        max_length=args.seq_len,
        packing=True,  # short samples share a row, and attention stays inside of each
        gradient_checkpointing=False,  # the patched layers need none; True combines with them
        optim="paged_adamw_8bit" if gpu else "adamw_torch",
        learning_rate=2e-4,
        bf16=True,
        use_cpu=not gpu,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )


def train(args: Namespace) -> tuple[list[float], int]:
    """The loss of each step, and the bytes that a batch keeps for backward."""
    set_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"batch_size": args.batch_size, "seq_len": args.seq_len, "optimizer": "adamw_8bit"}
    preset = None if args.stock else args.preset
    estimate(args.model, **sizes, config=preset, dtype="bfloat16", quantization=NF4, lora=LORA).print()
    model = AutoModelForCausalLM.from_pretrained(
        args.model, quantization_config=NF4, dtype=torch.bfloat16, device_map={"": device}
    )
    if not args.stock:
        patch_model(model, args.preset)  # the trainer adds the adapters later; they are patched, too
    trainer = SFTTrainer(
        model=model,
        args=training_arguments(args),
        train_dataset=Dataset.from_dict({"text": tiny.SENTENCES * 64}),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        peft_config=LORA,
    )
    trainer.train()
    batch = next(iter(trainer.get_train_dataloader()))
    kept = kept_bytes(lambda: trainer.compute_loss(trainer.model, dict(batch)), device)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], kept


def main(argv: list[str] | None = None) -> int:
    tiny.report(*train(tiny.parse(__doc__, argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
