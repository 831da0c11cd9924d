"""Fine-tune a sequence classifier (BERT-like) with fewer bytes kept for backward.

By default the texts are functions from Python's standard library and the classes are the packages they come from.

    python recipes/finetune_classification.py --compare
    python recipes/finetune_classification.py --model bert-base-uncased --dataset imdb --mixed-precision bf16

The only line that a training script of your own needs is the one with `patch_model`.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence

import common  # noqa: F401  it says which package is missing, so it comes first
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common.classes import load_task
from common.compare import Mode, RunResult, compare_runs, compute_dtype, dtype_of_loss, measure_peak
from common.data import Example, evaluation_loader, training_loader
from common.loop import run_steps
from common.models import BERT_CONFIGS, add_lora, build_model, nudge, trainable_parameters
from common.options import build_parser, parse
from common.report import print_run, publish
from common.state import losses_so_far, make_accelerator, save_model, total
from common.tokenization import get_tokenizer
from torch.utils.data import DataLoader, Dataset
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_actcompress import patch_model


class LabelledTexts(Dataset[Example]):
    """Tokenized texts with their classes, cut at --seq-len; the collator pads them."""

    def __init__(self, texts: list[str], labels: list[int], tokenizer: PreTrainedTokenizerBase, seq_len: int) -> None:
        self.rows = tokenizer(texts, truncation=True, max_length=seq_len)["input_ids"]
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Example:
        row = self.rows[index]
        return {"input_ids": row, "attention_mask": [1] * len(row), "labels": self.labels[index]}


def prepare_model(
    args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, classes: int, mode: Mode
) -> PreTrainedModel:
    """The model to train: stock, or the same weights patched."""
    model = build_model(args, AutoModelForSequenceClassification, tokenizer, num_labels=classes)
    model = add_lora(args, model, "SEQ_CLS")
    if mode == "patched":
        patch_model(model, args.preset, compile=args.compile_layers)  # keeps logits: few numbers per text
    if mode == "control":
        nudge(model, getattr(torch, compute_dtype(args)), args.seed)
    return model


def train_step(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[Example],
    max_grad_norm: float,
) -> float:
    """One optimizer step over several micro-batches of equal size. Returns the mean loss, over all processes."""
    step_loss = torch.zeros((), device=accelerator.device)
    for batch in batches:
        with accelerator.accumulate(model):
            # All micro-batches have equally many texts, so the mean of means that accelerate and DDP take is the mean.
            loss = model(**batch).loss
            accelerator.backward(loss)
            step_loss += loss.detach().float()
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
    return total(accelerator, step_loss).item() / (len(batches) * accelerator.num_processes)


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader[Example]) -> dict[str, float]:
    """Loss and accuracy on held-out texts. Stock code runs here: patches act only under autograd."""
    model.eval()
    sums = torch.zeros(3, device=accelerator.device)
    for batch in loader:
        outputs, labels = model(**batch), batch["labels"]
        right = (outputs.logits.argmax(-1) == labels).sum()
        sums += torch.stack([outputs.loss.float() * len(labels), right.float(), torch.ones_like(right) * len(labels)])
    model.train()
    loss, right, count = total(accelerator, sums).tolist()
    return {"held-out loss": loss / count, "accuracy": right / count}


def train(args: argparse.Namespace, mode: Mode) -> RunResult:
    """Train from the seed, or from a checkpoint, to --max-steps."""
    accelerator = make_accelerator(args)
    task = load_task(args)
    tokenizer = get_tokenizer(args, task.corpus, "masked")
    train_set = LabelledTexts(task.corpus.train, task.train_labels, tokenizer, args.seq_len)
    eval_set = LabelledTexts(task.corpus.held_out, task.held_out_labels, tokenizer, args.seq_len)
    collate = DataCollatorWithPadding(tokenizer)
    losses = losses_so_far(args)

    set_seed(args.seed)
    model = prepare_model(args, tokenizer, len(task.names), mode)  # before accelerator.prepare, which wraps it
    optimizer = torch.optim.AdamW(trainable_parameters(model), lr=args.lr, weight_decay=args.weight_decay)
    loader = training_loader(args, train_set, accelerator.num_processes, len(losses), collate)
    held_out = evaluation_loader(args, eval_set, accelerator.num_processes, collate)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
    set_seed(args.seed, device_specific=True)  # each process draws dropout masks of its own
    if args.resume:
        accelerator.load_state(args.resume)

    speeds = run_steps(args, accelerator, model, optimizer, loader, losses, train_step)
    metrics, peak = evaluate(accelerator, model, held_out), None
    if args.compare:
        batch = next(iter(held_out))  # the same one for stock and patched
        peak = measure_peak(accelerator, lambda: accelerator.backward(model(**batch).loss))
    else:
        save_model(accelerator, model, tokenizer, args.output_dir, losses)
    accelerator.free_memory()
    return RunResult(mode, losses, statistics.median(speeds), metrics, peak)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe; the exit status is 1 when an exact preset does not reproduce the stock losses."""
    parser = build_parser(__doc__ or "", BERT_CONFIGS)
    parser.add_argument("--label-column", default="label", help="of --dataset")
    parser.set_defaults(seq_len=128, batch_size=16, lr=5e-4, max_steps=150, eval_batches=40)
    args = parse(parser, argv)
    if args.compare:
        return publish(compare_runs(args, lambda mode: train(args, mode), dtype_of_loss(args)), args)
    print_run(train(args, "patched"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
