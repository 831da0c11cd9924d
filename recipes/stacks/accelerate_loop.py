"""A plain PyTorch loop with Accelerate: `patch_model` stands before `accelerator.prepare`.

    python recipes/stacks/accelerate_loop.py
    python recipes/stacks/accelerate_loop.py --model meta-llama/Llama-3.2-1B --batch-size 8 --seq-len 1024

`recipes/finetune_clm.py` is the same with a data set of your own, resuming and evaluation.
"""

import sys
from argparse import Namespace

import tiny
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_actcompress import kept_bytes, patch_model


def batches(args: Namespace, tokenizer) -> torch.utils.data.DataLoader:
    """Rows of `seq_len` tokens, cut from the text over and over."""
    ids = tokenizer(" ".join(tiny.SENTENCES), add_special_tokens=False)["input_ids"]
    length = args.steps * args.batch_size * args.seq_len
    rows = torch.tensor(ids * (length // len(ids) + 1))[:length].view(-1, args.seq_len)
    return torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in rows], args.batch_size)


def train(args: Namespace) -> tuple[list[float], int]:
    """The loss of each step, and the bytes that a batch keeps for backward."""
    set_seed(0)
    accelerator = Accelerator()
    model = AutoModelForCausalLM.from_pretrained(args.model)
    if not args.stock:
        patch_model(model, args.preset)  # the only line that is new
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = batches(args, AutoTokenizer.from_pretrained(args.model))
    model, optimizer, loader = accelerator.prepare(model.train(), optimizer, loader)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, kept_bytes(lambda: model(**batch).loss, accelerator.device)


def main(argv: list[str] | None = None) -> int:
    tiny.report(*train(tiny.parse(__doc__, argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
