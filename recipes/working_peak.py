"""The working peak of a checkpointed Llama: what backward needs above what is kept, in stock and with tiles.

    python recipes/working_peak.py --out recipes/results/working_peak      # some minutes on one core
    python recipes/working_peak.py --hidden 256 --tokens 2048 --tiles 64 --products

Layers have the proportions of Llama-3.1-8B. Matrix products and attention's kernels return memory without
values, because they take most of the time and no byte depends on values; with --products they run. The peaks are
those of a backward, by the CPU allocator's events, in bytes per token and channel, above all that was there before:
inputs of layers, weights, and the gradients to which a training adds. "frozen" has weights without gradients, "LoRA"
adapters of rank 32 on all linear layers, "trained" has all. "less gradients" is computed: it is "trained" without the
bytes of the MLP's gradients in the weights' dtype, which stay after a first step and are therefore kept. Tiles hold
them as sums in fp32 until the last tile; stock holds one at a time, so that this column favours stock. "MLP" is one
MLP alone; stock's is checkpointed by itself. Layers run module by module, so that a norm's backward needs what a GPU's
kernel needs: a plan's, on a CPU, computes it in fp32 from end to end. Writes working_peak.json and .md.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common.bench_models import with_adapters
from common.bench_report import environment
from common.files import replace_text
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaModel

from hf_actcompress import CompressionConfig, measure_step, patch_model

aten = torch.ops.aten
SKIPPED = (
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)  # fmt: skip
COLUMNS = (
    "frozen", "LoRA", "trained", "less gradients", "MLP frozen", "MLP LoRA", "MLP trained", "MLP less gradients",
)  # fmt: skip
STOCK = "stock"


class WithoutProducts(TorchDispatchMode):
    """Calls of `SKIPPED` allocate what they return, and compute nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in SKIPPED:
            return func(*args, **(kwargs or {}))
        shapes = func(*tree_map_only(torch.Tensor, partial(like, device="meta"), args), **(kwargs or {}))
        return tree_map_only(torch.Tensor, partial(like, device="cpu"), shapes)


def like(x: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


def llama(args: argparse.Namespace, weights: str, tile: int) -> Any:
    """A checkpointed model without its head, whose gradients exist; `tile` rows, 0 for stock."""
    torch.manual_seed(0)
    heads = max(4, args.hidden // 64)
    config = LlamaConfig(
        vocab_size=64, hidden_size=args.hidden, intermediate_size=7 * args.hidden // 2, num_hidden_layers=args.layers,
        num_attention_heads=heads, num_key_value_heads=heads // 4, use_cache=False,
    )  # fmt: skip
    model = LlamaModel(config).requires_grad_(weights == "trained")
    if weights == "LoRA":
        with_adapters(model, 32)
    model.to(torch.bfloat16).train()
    if tile:
        patch_model(model, CompressionConfig(tiled_mlp=tile, plans=False))
    model.gradient_checkpointing_enable()
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    return model


def peak(forward: Callable[[torch.Tensor], torch.Tensor], args: argparse.Namespace) -> float:
    """Peak bytes of the backward of one row of hidden states, per token and channel."""
    x = torch.randn(1, args.tokens, args.hidden, dtype=torch.bfloat16, requires_grad=True)
    # the proof, which a layer runs before its first call, needs values
    forward(x[:, :8].detach().requires_grad_()).sum().backward()
    with nullcontext() if args.products else WithoutProducts():
        y = forward(x)
        dy = torch.ones_like(y)
        return measure_step(lambda: y.backward(dy), "cpu").peak_bytes / x.numel()


def measure(args: argparse.Namespace, tile: int) -> dict[str, float]:
    """One row."""
    row = {}
    for weights in ("frozen", "LoRA", "trained"):
        model = llama(args, weights, tile)
        mlp = model.layers[0].mlp
        row[weights] = peak(lambda x, model=model: model(inputs_embeds=x).last_hidden_state, args)
        row[f"MLP {weights}"] = peak(mlp if tile else lambda x, mlp=mlp: checkpoint(mlp, x, use_reentrant=False), args)
    gradients = sum(p.nbytes for p in mlp.parameters()) / (args.tokens * args.hidden)
    row |= {f"{part}less gradients": row[f"{part}trained"] - gradients for part in ("", "MLP ")}
    return {column: row[column] for column in COLUMNS}


def rows(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, float]]]:
    for tile in (0, *args.tiles):
        yield f"tiles of {tile} rows" if tile else STOCK, measure(args, tile)


def markdown(found: dict[str, dict[str, float]], about: dict[str, Any]) -> str:
    lines = [f"`{about['command']}`", "", f"torch {about['torch']}, transformers {about['transformers']}"]
    lines += ["", f"| peak, h per token | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(f'{row[c]:.1f}' for c in COLUMNS)} |" for name, row in found.items()]
    return "\n".join(lines) + "\n"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--tiles", type=int, nargs="+", default=[512, 128, 64], help="rows; half of --hidden is auto")
    parser.add_argument("--products", action="store_true", help="compute them")
    parser.add_argument("--out", type=Path, default=Path("runs/working_peak"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    command = shlex.join(["python", "recipes/working_peak.py", *(sys.argv[1:] if argv is None else argv)])
    about, found = environment("cpu", command, vars(args)), {}
    for name, row in rows(args):
        found[name] = row
        replace_text(args.out / "working_peak.json", json.dumps({**about, "rows": found}, indent=2) + "\n")
        replace_text(args.out / "working_peak.md", markdown(found, about))
        print(name, {column: round(value, 2) for column, value in row.items()}, file=sys.stderr)
    print(markdown(found, about))
    return 0


if __name__ == "__main__":
    sys.exit(main())
