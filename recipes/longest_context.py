"""The longest context that a card can fine-tune an 8B model at, by `estimate`. Needs no GPU and downloads nothing.

    python recipes/longest_context.py --out recipes/results/longest_context

QLoRA of a model with the shape of Llama-3.1-8B, batch size 1. For each way to train, estimates the bytes that a card
must have at a few lengths, and interpolates linearly between them (the file says how much an estimate in between
differs from that). Writes longest_context.json, .md and, with matplotlib, .png. Another model:
``--config FOLDER_OR_HUB_NAME``; full fine-tuning: ``--full``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common.drawing import EXACT, LOSSY, STOCK, head, plain, save
from common.files import replace_text
from transformers import LlamaConfig

from hf_actcompress import CompressionConfig, Estimate, estimate

GIB = 2**30
# share of a card that is left free for fragmentation, as `plan` has it by default
HEADROOM = 0.08
# the lengths that are estimated; no answer is longer than the last one. From 16,384 tokens on, checkpointed layers run
# their MLPs in tiles without being asked
LENGTHS = (2_048, 16_383, 16_384, 65_536, 262_144, 524_288)
CARDS = (12, 16, 24, 40, 48, 80)
# answers are multiples of this
STEP = 64
# the sizes of Llama-3.1-8B, with as many positions as are asked for
SHAPE = {
    "vocab_size": 128_256, "hidden_size": 4_096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": LENGTHS[-1], "use_cache": False,
}  # fmt: skip

_LONG = CompressionConfig.from_preset("long")
# way -> config that patches the model, whether gradients are exact; all with gradient checkpointing
WAYS: dict[str, tuple[CompressionConfig | None, bool]] = {
    "stock": (None, True),
    "exact": (CompressionConfig(), True),
    "exact, whole logits": (CompressionConfig(logits=True), True),
    "long": (_LONG, True),
    "long, inputs in 8 bits": (CompressionConfig.from_preset("long", checkpoint_input="int8_outliers"), False),
    "long, inputs on the host": (CompressionConfig.from_preset("long", checkpoint_input="offload"), True),
}
# how a picture tells the ways of one role apart
STYLES = {
    "exact": "--", "exact, whole logits": ":", "long, inputs on the host": (0, (5, 1, 1, 1, 1, 1)),
}  # fmt: skip
# GiB -> a card with that memory, for the picture: a test holds them to quick/cards.py
NAMES = {
    8: "RTX 4060", 12: "RTX 3060", 16: "RTX 4080", 24: "RTX 4090", 40: "A100", 48: "RTX A6000", 80: "H100",
    140: "H200", 179: "B200",
}  # fmt: skip
# GiB that no card has, to read the picture by
BEYOND = (350, 700)


@dataclass(frozen=True)
class Way:
    """One way to train.

    Args:
        name: The key in WAYS.
        exact: Whether its gradients are stock's.
        device_bytes: Length -> bytes that a card must have.
        kept_bytes: Length -> bytes kept on the card between forward and backward.
        between: The estimate halfway between the last two lengths, divided by the interpolated value.
    """

    name: str
    exact: bool
    device_bytes: dict[int, int]
    kept_bytes: dict[int, int]
    between: float

    def longest(self, room: float) -> int:
        """The longest sequence within `room` bytes, a multiple of STEP; 0 if the shortest of LENGTHS does not fit."""
        lengths = list(self.device_bytes)
        fitting = [n for n in lengths if self.device_bytes[n] <= room]
        if not fitting or fitting[-1] == lengths[-1]:
            return fitting[-1] if fitting else 0
        low, high = fitting[-1], lengths[lengths.index(fitting[-1]) + 1]
        slope = (self.device_bytes[high] - self.device_bytes[low]) / (high - low)
        return int(low + (room - self.device_bytes[low]) / slope) // STEP * STEP


def measure(options: dict[str, Any], name: str, lengths: Sequence[int]) -> Way:
    config, exact = WAYS[name]

    def at(seq_len: int) -> Estimate:
        return estimate(batch_size=1, seq_len=seq_len, config=config, gradient_checkpointing=True, **options)

    found = {n: at(n) for n in lengths}
    sizes = {n: e.device_bytes for n, e in found.items()}
    low, high = lengths[-2:]
    middle = at((low + high) // 2).device_bytes
    between = 2 * middle / (sizes[low] + sizes[high])
    return Way(name, exact, sizes, {n: e.kept_bytes for n, e in found.items()}, between)


def markdown(ways: Sequence[Way], cards: Sequence[int], headroom: float) -> str:
    short = next(iter(ways[0].kept_bytes))
    lines = [
        f"| tokens on a card of | {' | '.join(f'{card} GiB' for card in cards)} | gradients | kept at {short:,} |",
        "|---" * (len(cards) + 3) + "|",
    ]
    for way in ways:
        found = " | ".join(f"{way.longest(card * GIB * (1 - headroom)):,}" for card in cards)
        kept = f"{way.kept_bytes[short] / GIB:.2f} GiB"
        lines.append(f"| {way.name} | {found} | {'exact' if way.exact else 'lossy'} | {kept} |")
    return "\n".join(lines) + "\n"


def title(args: argparse.Namespace) -> str:
    """What is trained, and how: all that the curves have in common."""
    model = Path(args.config).name if args.config else "a model of Llama-3.1-8B's shape"
    how = "All weights of" if args.full else f"QLoRA (rank {args.lora_r}, weights in nf4) of"
    return f"{how} {model}\nbfloat16, {args.optim}, batch 1, gradient checkpointing"


def draw(ways: Sequence[Way], path: Path, source: Path, args: argparse.Namespace) -> None:
    """The card that a length needs, as the table has it, with cards' names; `source` holds the data."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    scale = GIB * (1 - args.headroom)
    # the legend lists them as they lie
    for way in sorted(ways, key=lambda way: -max(way.device_bytes.values())):
        lengths, sizes = list(way.device_bytes), [size / scale for size in way.device_bytes.values()]
        # straight in bytes, as `longest` reads them, and so bent on these axes
        places = np.union1d(lengths, np.geomspace(lengths[0], lengths[-1], 200))
        colour = STOCK if way.name == "stock" else EXACT if way.exact else LOSSY
        look = {"color": colour, "linestyle": STYLES.get(way.name, "-")}
        name = way.name if way.exact else f"{way.name} (lossy)"
        axes.plot(places, np.interp(places, lengths, sizes), label=name, linewidth=1.6, **look)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.xaxis.set_major_formatter("{x:,.0f}")
    low, high = axes.get_ylim()
    for card in NAMES:
        axes.axhline(card, color="0.85", linewidth=0.8, zorder=0)
    axes.set_xlabel("tokens of one sequence", fontsize=9)
    axes.set_ylabel(f"memory of the card, {args.headroom:.0%} of it left free", fontsize=9)
    cards = [f"{card} GiB ({name})" for card, name in NAMES.items()]
    axes.set_yticks([*NAMES, *BEYOND], [*cards, *(f"{size} GiB" for size in BEYOND)])
    axes.set_ylim(low, high)
    axes.legend(fontsize=8, frameon=False, handlelength=3.5)
    plain(axes)
    head(figure, title(args))
    save(figure, path, source, dpi=150)


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """What all estimates have in common."""
    adapters = {} if args.full else {"lora": args.lora_r, "quantization": "nf4"}
    return {"model": args.config or LlamaConfig(**SHAPE), "dtype": "bfloat16", "optimizer": args.optim, **adapters}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--config", help="a folder with a config.json, or a model of the hub, of which that is read")
    parser.add_argument("--full", action="store_true", help="train all weights in bf16, in place of QLoRA")
    parser.add_argument("--lora-r", type=int, default=32)
    parser.add_argument("--optim", default="adamw_8bit")
    parser.add_argument("--cards", type=int, nargs="+", default=CARDS, metavar="GIB")
    parser.add_argument("--headroom", type=float, default=HEADROOM, help="share of a card that is left free")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="two or more that are estimated")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    options = options_of(args)
    ways: list[Way] = []
    for name in args.ways:
        ways.append(measure(options, name, args.lengths))
        print(f"{name}: done", file=sys.stderr)
        table = markdown(ways, args.cards, args.headroom)
        found = {
            "command": f"python recipes/longest_context.py {' '.join(sys.argv[1:] if argv is None else argv)}",
            "torch": torch.__version__,
            "headroom": args.headroom,
            "ways": [
                {**vars(way), "longest": {card: way.longest(card * GIB * (1 - args.headroom)) for card in args.cards}}
                for way in ways
            ],
        }
        replace_text(args.out / "longest_context.json", json.dumps(found, indent=2) + "\n")
        replace_text(args.out / "longest_context.md", table)
    try:
        draw(ways, args.out / "longest_context.png", args.out / "longest_context.json", args)
    except ImportError:
        print("no picture: matplotlib is not installed", file=sys.stderr)
    print(table)
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
