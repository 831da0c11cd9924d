"""Train a masked language model (BERT-like) with fewer bytes kept for backward.

    python recipes/finetune_mlm.py --compare                      # small BERT on the standard library's source
    python recipes/finetune_mlm.py --model bert-base-uncased --dataset imdb --mixed-precision bf16 --compare

The only line that a training script of your own needs is the one with `patch_model`.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Sequence

import common  # noqa: F401  it says which package is missing, so it comes first
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common.compare import Mode, RunResult, compare_runs, compute_dtype, dtype_of_loss, measure_peak
from common.data import Example, corpus_blocks, evaluation_loader, load_corpus, training_loader
from common.loop import run_steps
from common.models import BERT_CONFIGS, add_lora, build_model, nudge, trainable_parameters
from common.options import build_parser, parse, probability
from common.report import print_run, publish
from common.state import IGNORE, losses_so_far, make_accelerator, save_model, total
from common.tokenization import get_tokenizer
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase

from hf_actcompress import patch_model


class MaskedBlocks(Dataset[Example]):
    """Rows of tokens, some of them hidden as in BERT: 80% of these become the mask, 10% a random token, 10% stay.

    The mask of a row follows from the seed and the row's number, so that it is the same in every run, and again
    after a resume. A second pass over the data sees the same masks; runs here are shorter than one pass.
    """

    def __init__(self, blocks: torch.Tensor, tokenizer: PreTrainedTokenizerBase, fraction: float, seed: int) -> None:
        self.blocks, self.tokenizer, self.fraction, self.seed = blocks, tokenizer, fraction, seed

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> Example:
        tokens = self.blocks[index].clone()
        labels = tokens.clone()
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        draws = torch.rand(2, len(tokens), generator=generator)
        hidden = draws[0] < self.fraction
        hidden[int(draws[1].argmax())] = True  # at least one, or the row's mean loss is 0 / 0
        labels[~hidden] = IGNORE
        tokens[hidden & (draws[1] < 0.8)] = self.tokenizer.mask_token_id
        random = hidden & (draws[1] >= 0.8) & (draws[1] < 0.9)
        replacements = torch.randint(len(self.tokenizer), tokens.shape, generator=generator)
        return {"input_ids": torch.where(random, replacements, tokens), "labels": labels}


def prepare_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, mode: Mode) -> PreTrainedModel:
    """The model to train: stock, or the same weights patched."""
    model = add_lora(args, build_model(args, AutoModelForMaskedLM, tokenizer), task=None)
    if mode == "patched":
        patch_model(model, args.preset, compile=args.compile_layers)
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
    """One optimizer step over several micro-batches. Returns the mean loss per hidden token, over all processes."""
    counts = [(batch["labels"] != IGNORE).sum() for batch in batches]
    tokens = total(accelerator, sum(counts))
    # accelerate divides by the micro-batches and DDP by the processes; `tokens` counts them already.
    scale = accelerator.gradient_accumulation_steps * accelerator.num_processes
    step_loss = torch.zeros((), device=accelerator.device)
    for batch, count in zip(batches, counts, strict=True):
        with accelerator.accumulate(model):
            # Masked-LM heads take no num_items_in_batch: they return a mean, which is weighted by its share of tokens
            # here.
            loss = model(**batch).loss * (count / tokens)
            accelerator.backward(loss * scale)
            step_loss += loss.detach().float()
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
    return total(accelerator, step_loss).item()


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader[Example]) -> dict[str, float]:
    """Loss per hidden token of held-out text and its perplexity. Stock code runs here."""
    model.eval()
    sums = torch.zeros(2, device=accelerator.device)
    for batch in loader:
        tokens = (batch["labels"] != IGNORE).sum()
        sums += torch.stack([model(**batch).loss.float() * tokens, tokens.float()])
    model.train()
    loss, tokens = total(accelerator, sums).tolist()
    return {"held-out loss": loss / tokens, "perplexity": math.exp(min(loss / tokens, 700))}


def train(args: argparse.Namespace, mode: Mode) -> RunResult:
    """Train from the seed, or from a checkpoint, to --max-steps."""
    accelerator = make_accelerator(args)
    corpus = load_corpus(args)
    tokenizer = get_tokenizer(args, corpus, "masked")
    blocks = corpus_blocks(args, corpus, tokenizer)
    train_set, eval_set = (MaskedBlocks(rows, tokenizer, args.mask_fraction, args.seed) for rows in blocks)
    losses = losses_so_far(args)

    set_seed(args.seed)
    model = prepare_model(args, tokenizer, mode)  # before accelerator.prepare, which wraps it
    optimizer = torch.optim.AdamW(trainable_parameters(model), lr=args.lr, weight_decay=args.weight_decay)
    loader = training_loader(args, train_set, accelerator.num_processes, len(losses))
    held_out = evaluation_loader(args, eval_set, accelerator.num_processes)
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
    parser.add_argument("--mask-fraction", type=probability, default=0.15, help="of the tokens that are hidden")
    parser.set_defaults(seq_len=128)
    args = parse(parser, argv)
    if args.compare:
        return publish(compare_runs(args, lambda mode: train(args, mode), dtype_of_loss(args)), args)
    print_run(train(args, "patched"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
