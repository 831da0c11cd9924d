"""TRL's DPOTrainer with LoRA and a patched model. The reference is the same model without its adapters.

    python recipes/stacks/trl_dpo.py
    python recipes/stacks/trl_dpo.py --model Qwen/Qwen2.5-0.5B-Instruct --batch-size 2 --seq-len 1024

What the reference computes runs without autograd, so it keeps nothing, patched or not. Needs trl.
"""

import sys
from argparse import Namespace

import tiny
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import DPOConfig, DPOTrainer

from hf_actcompress import kept_bytes, patch_model


def preferences() -> Dataset:
    """A sentence's second half is better than the same words in the wrong order."""
    rows = []
    for words in (sentence.split() for sentence in tiny.SENTENCES):
        start, end = words[: len(words) // 2], words[len(words) // 2 :]
        texts = {"prompt": start, "chosen": end, "rejected": end[::-1]}
        rows.append({name: " " + " ".join(part) for name, part in texts.items()})
    return Dataset.from_list(rows * 16)


def train(args: Namespace) -> tuple[list[float], int]:
    """The loss of each step, and the bytes that a batch keeps for backward."""
    set_seed(0)
    gpu = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(args.model)
    if not args.stock:
        patch_model(model, args.preset)  # the trainer adds the adapters later; they are patched, too
    settings = DPOConfig(
        output_dir=str(args.output_dir),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        max_length=args.seq_len,
        gradient_checkpointing=False,
        learning_rate=1e-3,
        bf16=gpu,
        use_cpu=not gpu,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = DPOTrainer(
        model=model,
        args=settings,
        train_dataset=preferences(),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear"),
    )
    trainer.train()
    batch = next(iter(trainer.get_train_dataloader()))
    kept = kept_bytes(lambda: trainer.compute_loss(trainer.model, dict(batch)), trainer.args.device)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], kept


def main(argv: list[str] | None = None) -> int:
    tiny.report(*train(tiny.parse(__doc__, argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
