"""Fine-tune a causal language model (GPT-2-like, Llama-like) with fewer bytes kept for backward.

    python recipes/finetune_clm.py --compare             # small Llama on the standard library's source, ~2 minutes
    python recipes/finetune_clm.py --model gpt2 --dataset wikitext --dataset-config wikitext-2-raw-v1 --compare
    accelerate launch --config_file recipes/accelerate/fsdp2.yaml recipes/finetune_clm.py --model ... --lora

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
from common.compare import Mode, RunResult, compare_runs, compute_dtype, measure_peak
from common.data import CausalBlocks, Example, corpus_blocks, evaluation_loader, load_corpus, training_loader
from common.loop import run_steps
from common.models import CAUSAL_CONFIGS, add_lora, build_model, nudge, trainable_parameters
from common.options import build_parser, parse
from common.report import print_run, publish
from common.state import IGNORE, losses_so_far, make_accelerator, save_model, total
from common.tokenization import get_tokenizer
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from hf_actcompress import patch_model


def prepare_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, mode: Mode) -> PreTrainedModel:
    """The model to train: stock, or the same weights patched."""
    model = add_lora(args, build_model(args, AutoModelForCausalLM, tokenizer), "CAUSAL_LM")
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
    """One optimizer step over several micro-batches. Returns the mean loss per token, over all processes."""
    # Every token weighs the same, whichever micro-batch or process it is in: the sum of losses is divided by this.
    tokens = total(accelerator, sum((batch["labels"][:, 1:] != IGNORE).sum() for batch in batches))
    # accelerate divides by the micro-batches and DDP by the processes; `tokens` counts them already.
    scale = accelerator.gradient_accumulation_steps * accelerator.num_processes
    step_loss = torch.zeros((), device=accelerator.device)
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch, use_cache=False, num_items_in_batch=tokens).loss
            accelerator.backward(loss * scale)
            step_loss += loss.detach().float()
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
    return total(accelerator, step_loss).item()


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader[Example]) -> dict[str, float]:
    """Loss per held-out token and its perplexity. Stock code runs here: patches act only under autograd."""
    model.eval()
    sums = torch.zeros(2, device=accelerator.device)
    for batch in loader:
        tokens = (batch["labels"][:, 1:] != IGNORE).sum()
        sums += torch.stack([model(**batch, use_cache=False).loss.float() * tokens, tokens.float()])
    model.train()
    loss, tokens = total(accelerator, sums).tolist()
    return {"held-out loss": loss / tokens, "perplexity": math.exp(min(loss / tokens, 700))}


def train(args: argparse.Namespace, mode: Mode) -> RunResult:
    """Train from the seed, or from a checkpoint, to --max-steps."""
    accelerator = make_accelerator(args)
    corpus = load_corpus(args)
    tokenizer = get_tokenizer(args, corpus, "causal")
    train_set, eval_set = map(CausalBlocks, corpus_blocks(args, corpus, tokenizer))
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
        peak = measure_peak(accelerator, lambda: accelerator.backward(model(**batch, use_cache=False).loss))
    else:
        save_model(accelerator, model, tokenizer, args.output_dir, losses)
    accelerator.free_memory()
    return RunResult(mode, losses, statistics.median(speeds), metrics, peak)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe; the exit status is 1 when an exact preset does not reproduce the stock losses."""
    args = parse(build_parser(__doc__ or "", CAUSAL_CONFIGS), argv)
    if args.compare:
        return publish(compare_runs(args, lambda mode: train(args, mode)), args)
    print_run(train(args, "patched"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
