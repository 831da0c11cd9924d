"""What one Llama block keeps between forward and backward, before and after `patch_model`, as a picture in plain text.

    python recipes/block_picture.py --out recipes/results/readme/block.txt

The figures are those of `memory_report` on a small model with the proportions of Llama 3 (MLP of 3.5 h, a key head per
four query heads) in bf16: bytes per token, divided by the hidden size h.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_actcompress import memory_report

# part -> what it keeps, in words, in the order in which the block runs the parts
PARTS = {
    "input_layernorm": "norm: its input, in fp32 in stock",
    "self_attn.q_proj": "q, k, v: the norm's output",
    "self_attn": "attention: q, k, v, output",
    "post_attention_layernorm": "norm: its input, in fp32 in stock",
    "mlp.gate_proj": "gate, up: the norm's output",
    "mlp.act_fn": "act: its input",
    "mlp": "act(gate) x up: two tensors",
    "mlp.down_proj": "down: the product",
}
BYTES_PER_MARK = 1.0


def block_bytes(hidden: int = 256, seq_len: int = 256) -> dict[str, tuple[float, float]]:
    """Bytes per token and h of each part of the second of two blocks, stock and patched."""
    sizes = dict(hidden_size=hidden, intermediate_size=hidden * 7 // 2, num_hidden_layers=2, vocab_size=128)
    heads = dict(num_attention_heads=8, num_key_value_heads=2)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).bfloat16()
    ids = torch.randint(3, 128, (2, seq_len))
    rows = memory_report(model, {"input_ids": ids, "labels": ids}).rows
    prefix, unit = "model.layers.1.", ids.numel() * hidden
    return {
        row.module.removeprefix(prefix): (row.stock_bytes / unit, row.patched_bytes / unit)
        for row in rows
        if row.module.startswith(prefix)
    }


def drawn(parts: dict[str, tuple[float, float]]) -> Iterable[str]:
    """A line per part: a bar and a figure for stock, the same for patched."""
    unknown = parts.keys() - PARTS.keys()
    if unknown:
        raise SystemExit(f"the block also keeps something in {sorted(unknown)}: give them a line in PARTS")
    yield f"{'kept, in h per token':34} {'stock':>22} {'patched':>22}"
    for name, words in PARTS.items():
        yield f"{words:34} " + " ".join(_bar(size) for size in parts.get(name, (0.0, 0.0)))
    yield f"{'the block':34} " + " ".join(f"{sum(column):22.2f}" for column in zip(*parts.values(), strict=True))


def _bar(size: float) -> str:
    return f"{'#' * round(size / BYTES_PER_MARK):>16} {size:5.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="a text file; the console by default")
    args = parser.parse_args(argv)
    text = "\n".join(drawn(block_bytes())) + "\n"
    if args.out is None:
        print(text, end="")
    else:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
