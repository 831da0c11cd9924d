"""Sentence embeddings: a patched encoder under a loss of sentence-transformers.

    python recipes/stacks/sentence_transformers_loss.py
    python recipes/stacks/sentence_transformers_loss.py --model sentence-transformers/all-MiniLM-L6-v2 --batch-size 64

`patch_model` takes the SentenceTransformer as a whole: its encoder is patched, the pooling is left as it is. Needs
sentence-transformers.
"""

import sys
from argparse import Namespace

import tiny
import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss
from transformers import set_seed

from hf_actcompress import kept_bytes, patch_model


def pairs() -> Dataset:
    """Sentences that follow each other belong together; the batch's other sentences are the negatives."""
    return Dataset.from_dict({"anchor": tiny.SENTENCES[:-1] * 16, "positive": tiny.SENTENCES[1:] * 16})


def train(args: Namespace) -> tuple[list[float], int]:
    """The loss of each step, and the bytes that a batch keeps for backward."""
    set_seed(0)
    gpu = torch.cuda.is_available()
    model = SentenceTransformer(args.model, device="cuda" if gpu else "cpu")
    model.max_seq_length = args.seq_len
    if not args.stock:
        patch_model(model, args.preset)
    settings = SentenceTransformerTrainingArguments(
        output_dir=str(args.output_dir),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        learning_rate=1e-3,
        use_cpu=not gpu,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    loss = MultipleNegativesRankingLoss(model)
    trainer = SentenceTransformerTrainer(model=model, args=settings, train_dataset=pairs(), loss=loss)
    trainer.train()
    batch = next(iter(trainer.get_train_dataloader()))
    kept = kept_bytes(lambda: trainer.compute_loss(model, batch), model.device)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], kept


def main(argv: list[str] | None = None) -> int:
    tiny.report(*train(tiny.parse(__doc__, argv, default="bert")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
