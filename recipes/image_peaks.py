"""What the peak of an image classifier's step is made of, in stock and where parts of linear inputs are kept.

    python recipes/image_peaks.py --out recipes/results/image_peaks      # some minutes on one core
    python recipes/image_peaks.py --settings resnet --presets pooled

Pooled activations and block-sparse activations claim 29% and 32% less memory. They replace the inputs of linear layers
and convolutions, so a peak falls by what these are of it, less what backward needs to work. Three settings are those
of recipes/finetune_image.py, three are the papers' models at 224 pixels, and one is a ResNet-18 without its max
pooling, which shows what its stem does. Bytes are the CPU allocator's; no byte depends on values.

"linear inputs" are the inputs of linear layers and convolutions, each storage once, or what a preset keeps of them;
"pooling" is what max pooling reads, and its indices; the other kinds are the modules that keep something else. "kept"
and "working" are what is held at the peak: what the forward made for backward, and all else. "peak" is their sum, and
"of all" is the same with weights, gradients and AdamW's states, as shares of stock's. "at the peak" says in which half
of the step it is, and which ops made the largest working blocks. The first table has, of stock, shares of what is kept
when backward begins and of the peak, and of each preset what it leaves of stock's. Writes image_peaks.json and .md.
"""

import argparse
import copy
import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import paper_settings as at
from common.bench_report import environment
from common.files import replace_text
from common.images import Batch, small_resmlp, small_resnet, small_vit
from common.peak import Peak, peak_of
from torch import nn

from hf_actcompress import PRESETS, memory_report, patch_model

MIB = 2**20
LINEAR = (nn.Linear, nn.Conv2d)
KINDS = ("linear inputs", "norms", "activations", "attention", "pooling", "rest")
COLUMNS = (
    "weights, gradients, states", *KINDS, "at backward's start", "kept", "working", "peak", "peak, of stock",
    "of all", "at the peak",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """A model, and the size and number of its images."""

    build: Callable[[], nn.Module]
    size: int
    count: int

    def batch(self) -> Batch:
        return at.Scale("default", image=self.size).images(self.count)


def without_pooling() -> nn.Module:
    """A ResNet-18 whose stem has no max pooling."""
    model = at.resnet(at.SCALES["default"], 18)
    model.resnet.embedder.pooler = nn.Identity()
    return model


SETTINGS = {
    "resnet": Setting(lambda: small_resnet(32, 10), 32, 32),
    "vit": Setting(lambda: small_vit(32, 10), 32, 32),
    "resmlp": Setting(lambda: small_resmlp(32, 10), 32, 32),
    "ResNet-18": Setting(lambda: at.resnet(at.SCALES["default"], 18), 224, 16),
    "ResNet-18 without max pooling": Setting(without_pooling, 112, 16),
    "ResNet-50": Setting(lambda: at.resnet(at.SCALES["default"], 50), 224, 16),
    "ResMLP-S12": Setting(lambda: at.resmlp_s12(at.SCALES["default"]), 224, 16),
}


def kind_of(module: nn.Module) -> str:
    name = type(module).__name__
    if isinstance(module, LINEAR):
        return KINDS[0]
    if "Norm" in name:
        return "norms"
    if "MaxPool" in name:
        return "pooling"
    if "Attention" in name:
        return "attention"
    is_activation = type(module).__module__ in ("torch.nn.modules.activation", "transformers.activations")
    return "activations" if is_activation else "rest"


def stock_kinds(model: nn.Module, batch: Batch) -> Counter[str]:
    """Bytes that stock keeps, by kind; what a linear layer, a convolution or a pooling reads is of its kind alone."""
    readers: dict[int, str] = {}
    saved: dict[int, tuple[int, str]] = {}
    running: list[nn.Module] = [model]
    given = {x.untyped_storage().data_ptr() for x in (*batch.values(), *model.parameters(), *model.buffers())}

    def enter(module: nn.Module, args: Any) -> None:
        running.append(module)
        address, kind = args[0].untyped_storage().data_ptr() if args else 0, kind_of(module)
        if kind == KINDS[0] or (kind == "pooling" and address not in readers):
            readers[address] = kind

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in given:
            saved.setdefault(storage.data_ptr(), (storage.nbytes(), kind_of(running[-1])))
        return x

    hooks = [m.register_forward_pre_hook(enter) for m in model.modules()]
    hooks += [m.register_forward_hook(lambda *_: running.pop() and None) for m in model.modules()]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(**batch).loss
    for hook in hooks:
        hook.remove()
    del loss
    kinds: Counter[str] = Counter()
    for address, (nbytes, kind) in saved.items():
        kinds[readers.get(address, kind)] += nbytes
    return kinds


def patched_kinds(stock: nn.Module, batch: Batch, preset: str) -> Counter[str]:
    """Bytes that a preset keeps, by the kind of the module."""
    modules = dict(stock.named_modules())
    kinds: Counter[str] = Counter()
    for row in memory_report(copy.deepcopy(stock), batch, preset).rows:
        kinds[kind_of(modules[row.module])] += row.patched_bytes
    return kinds


def fixed_bytes(model: nn.Module) -> int:
    """Weights, gradients and AdamW's states after a step."""
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    states = [x for state in optimizer.state.values() for x in state.values()]
    return sum(x.nbytes for x in states) + sum(p.nbytes + p.grad.nbytes for p in model.parameters())


def measure(setting: Setting, preset: str) -> dict[str, Any]:
    """One row."""
    torch.manual_seed(0)
    stock, batch = setting.build().train(), setting.batch()
    model = copy.deepcopy(stock)
    if preset != "stock":
        patch_model(model, preset)

    def step() -> None:
        model(**batch).loss.backward()

    step()  # so that the gradients exist
    peak = peak_of(step)
    kinds = stock_kinds(stock, batch) if preset == "stock" else patched_kinds(stock, batch, preset)
    return {
        "fixed": fixed_bytes(model),
        "kinds": {kind: kinds[kind] for kind in KINDS},
        "at_start": peak.at_start,
        "kept": peak.kept,
        "working": peak.nbytes - peak.kept,
        "peak": peak.nbytes,
        "where": where(peak),
    }


def where(peak: Peak) -> str:
    """In which half the peak is, and its largest working blocks."""
    sizes: Counter[str] = Counter()
    for block in peak.working:
        sizes[block.maker] += block.nbytes
    total = sum(sizes.values())
    listed = [f"{maker} {nbytes / MIB:.2f}" for maker, nbytes in sizes.most_common(4) if nbytes > 0.05 * total]
    return f"{'backward' if peak.in_backward else 'forward'}: {', '.join(listed)}"


def cells(row: dict[str, Any], stock: dict[str, Any]) -> Iterator[str]:
    for nbytes in (row["fixed"], *row["kinds"].values(), row["at_start"], row["kept"], row["working"], row["peak"]):
        yield f"{nbytes / MIB:.2f}"
    yield f"{row['peak'] / stock['peak']:.3f}"
    yield f"{of_all(row, stock):.3f}"
    yield row["where"]


def summary(found: dict[str, dict[str, Any]], presets: Sequence[str]) -> list[str]:
    """A row per setting: two shares of what stock keeps, one of its peak, and what the presets leave of both."""
    columns = ["setting", "images", "linear inputs, of kept", "pooling, of kept", "working, of the peak"]
    columns += [f"{preset}: {what}" for preset in presets for what in ("kept", "peak", "of all")]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, rows in found.items():
        stock, setting = rows["stock"], SETTINGS[name]
        shares = [stock["kinds"][kind] / stock["at_start"] for kind in ("linear inputs", "pooling")]
        values = [*shares, stock["working"] / stock["peak"]]
        for row in (rows[preset] for preset in presets):
            values += [row["at_start"] / stock["at_start"], row["peak"] / stock["peak"], of_all(row, stock)]
        images = f"{setting.count} of {setting.size} x {setting.size}"
        lines.append(f"| {name} | {images} | {' | '.join(f'{value:.3f}' for value in values)} |")
    return lines


def of_all(row: dict[str, Any], stock: dict[str, Any]) -> float:
    return float((row["peak"] + row["fixed"]) / (stock["peak"] + stock["fixed"]))


def markdown(found: dict[str, dict[str, Any]], about: dict[str, Any]) -> str:
    lines = [f"`{about['command']}`", "", f"{about['device']}, torch {about['torch']}, transformers "]
    lines[-1] += f"{about['transformers']}; below the first table in MiB"
    lines += ["", *summary(found, about["options"]["presets"])]
    for name, rows in found.items():
        lines += ["", f"## {name}", ""]
        lines += [f"| preset | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
        lines += [f"| {preset} | {' | '.join(cells(row, rows['stock']))} |" for preset, row in rows.items()]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--presets", nargs="+", choices=list(PRESETS), default=["exact", "pooled", "blocksparse"])
    parser.add_argument("--out", type=Path, default=Path("runs/image_peaks"))
    args = parser.parse_args(argv)
    command = shlex.join(["python", "recipes/image_peaks.py", *(sys.argv[1:] if argv is None else argv)])
    about = environment("cpu", command, vars(args))
    found: dict[str, dict[str, Any]] = {}
    for name in args.settings:
        for preset in ("stock", *args.presets):
            found.setdefault(name, {})[preset] = measure(SETTINGS[name], preset)
            print(name, preset, found[name][preset], file=sys.stderr)
        replace_text(args.out / "image_peaks.json", json.dumps({**about, "rows": found}, indent=2) + "\n")
        replace_text(args.out / "image_peaks.md", markdown(found, about))
    print(markdown(found, about))
    return 0


if __name__ == "__main__":
    sys.exit(main())
