"""Train image classifiers with fewer bytes kept for backward: a ViT, a ResNet, a ResMLP of plain torch modules.

    python recipes/finetune_image.py                                       # the ViT, preset exact
    python recipes/finetune_image.py --models vit resnet resmlp --compare  # a table of presets, 15 minutes on one core
    python recipes/finetune_image.py --models google/vit-base-patch16-224 --image-size 224 --dataset my-folder

By default the images are scikit-learn's handwritten digits, made larger. A local --dataset is a folder with a folder of
images for each class. With --compare each preset is trained from the same seeds as stock. Kept bytes and the peak (of
forward and backward above weights and gradients) are the allocator's, of one batch. A step's time is the least of
--rounds, in which stock and all presets take turns. Writes image.json and image.md; results of an earlier run with the
same options for other models stay in them. An accuracy is followed by its standard deviation over seeds, and the mean
difference from stock of the same seed by its 95% interval.
The only line that a training script of your own needs is the one with `patch_model`.
"""

import argparse
import copy
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common.bench_report import environment
from common.evaluation_report import interval
from common.files import replace_text
from common.images import IMAGE_MODELS, Batch, Images, accuracy, fit_images, image_model, load_images
from common.options import positive
from tqdm.auto import tqdm

from hf_actcompress import PRESETS, kept_bytes, measure_step, patch_model

COMPARED = ("exact", "int8", "mesa", "gact", "actnn", "forward_ad", "pooled", "blocksparse", "dropit")
COLUMNS = ("kept MiB", "kept, of stock", "peak MiB", "peak, of stock", "x step", "accuracy", "against stock, points")
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One preset on one model, by a command; accuracies are those of the seeds, in order."""

    model: str
    preset: str
    kept_bytes: int
    peak_bytes: int
    seconds: float
    accuracies: list[float]
    command: str


def prepared(name: str, preset: str, images: Images, args: argparse.Namespace, seed: int) -> Any:
    """The model of that seed, patched unless the preset is "stock"."""
    model = image_model(name, images, seed).to(args.device)
    return model if preset == "stock" else patch_model(model, preset, seed=seed)


def stepper(model: Any, batch: Batch, device: str) -> Callable[[], float]:
    """Runs a forward and backward of a copy of the model and returns its seconds."""
    model = copy.deepcopy(model)

    def step() -> float:
        began = time.perf_counter()
        model(**batch).loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    return step


def measure_model(name: str, images: Images, args: argparse.Namespace, command: str) -> list[Row]:
    """Stock and every preset of --presets."""
    presets = ("stock", *args.presets)
    models = {preset: prepared(name, preset, images, args, seed=0) for preset in presets}
    batch = next(images.batches(0, 1, args.batch_size, args.device))
    steps = {preset: stepper(model, batch, args.device) for preset, model in models.items()}
    for step in steps.values():
        step()  # so that the gradients exist
    times = [{preset: step() for preset, step in steps.items()} for _ in range(args.rounds)]
    rows = []
    for preset in tqdm(presets, desc=name):
        kept = kept_bytes(lambda preset=preset: models[preset](**batch).loss, args.device)
        peak = measure_step(steps[preset], args.device).peak_bytes
        found = [trained(name, preset, images, args, seed)[1] for seed in range(args.seeds)]
        rows.append(Row(name, preset, kept, peak, min(t[preset] for t in times), found, command))
    return rows


def trained(name: str, preset: str, images: Images, args: argparse.Namespace, seed: int) -> tuple[Any, float]:
    """The model trained from that seed, and its accuracy on held-out images."""
    model = prepared(name, preset, images, args, seed)
    fit_images(model, images, args, seed)
    return model, accuracy(model, images, args.batch_size, args.device)


def markdown(rows: Sequence[Row], images: Images, args: argparse.Namespace, about: dict[str, Any]) -> str:
    """A table per model."""
    commands = dict.fromkeys(f"`{row.command}`" for row in rows)
    lines = [", ".join(commands), "", f"{about['device']}, {about['threads']} threads, torch {about['torch']}, "]
    lines[-1] += f"transformers {about['transformers']}; {images.name}, {len(images.train[1])} to train on, "
    lines[-1] += f"{len(images.held_out[1])} held out, {images.size} x {images.size} pixels, batches of "
    lines[-1] += f"{args.batch_size}, {args.max_steps} steps, {args.seeds} seeds"
    for name in dict.fromkeys(row.model for row in rows):
        ours = [row for row in rows if row.model == name]
        lines += ["", f"## {name}", "", f"| preset | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
        lines += [f"| {row.preset} | {' | '.join(_cells(row, ours[0]))} |" for row in ours]
    return "\n".join(lines) + "\n"


def _cells(row: Row, stock: Row) -> tuple[str, ...]:
    spread = statistics.stdev(row.accuracies) if len(row.accuracies) > 1 else 0.0
    gaps = [100 * (a - b) for a, b in zip(row.accuracies, stock.accuracies, strict=True)]
    return (
        f"{row.kept_bytes / MIB:.2f}",
        f"{row.kept_bytes / stock.kept_bytes:.3f}",
        f"{row.peak_bytes / MIB:.2f}",
        f"{row.peak_bytes / stock.peak_bytes:.3f}",
        f"{row.seconds / stock.seconds:.2f}",
        f"{statistics.mean(row.accuracies):.2%} ± {spread:.2%}",
        f"{statistics.mean(gaps):+.2f} ± {interval(gaps) or 0:.2f}",
    )


def train_one(name: str, images: Images, args: argparse.Namespace) -> None:
    """Train with --preset and save: as stock transformers loads it, or the state dict of a plain torch model."""
    model, found = trained(name, args.preset, images, args, args.seed)
    folder = args.output_dir / Path(name).name
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
    else:
        torch.save(model.state_dict(), folder / "weights.pt")
    print(f"{name}: {found:.2%} of {len(images.held_out[1])} held-out images; saved in {folder}")


def earlier_rows(path: Path, about: dict[str, Any]) -> list[Row]:
    """The rows that a run with the same options, except for the models, has written there."""
    found = json.loads(path.read_text()) if path.is_file() else {"options": {}}
    options = [{**one["options"], "models": None} for one in (found, about)]
    return [Row(**row) for row in found["rows"]] if options[0] == options[1] else []


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["vit"], help=f"{', '.join(IMAGE_MODELS)}, or a pretrained one")
    parser.add_argument("--preset", choices=list(PRESETS), default="exact", help="what is kept for backward")
    parser.add_argument("--compare", action="store_true", help="measure --presets beside stock, and save no model")
    parser.add_argument("--presets", nargs="+", choices=list(PRESETS), default=list(COMPARED))
    parser.add_argument("--dataset", help="hub name or local folder, read by datasets.load_dataset")
    parser.add_argument("--dataset-config", help="the dataset's configuration name")
    parser.add_argument("--image-column", default="image")
    parser.add_argument("--label-column", default="label")
    parser.add_argument("--image-size", type=positive(int), default=32, help="pixels, to which images are scaled")
    parser.add_argument("--max-images", type=positive(int), default=10_000, help="of each split; they are in memory")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--max-steps", type=positive(int), default=150)
    parser.add_argument("--batch-size", type=positive(int), default=32)
    parser.add_argument("--lr", type=positive(float), default=3e-3)
    parser.add_argument("--seed", type=int, default=0, help="of a run without --compare")
    parser.add_argument("--seeds", type=positive(int), default=3, help="with --compare")
    parser.add_argument("--rounds", type=positive(int), default=10, help="timed steps of each preset")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/finetune_image"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, or measure and write the table."""
    args = parse_args(argv)
    images = load_images(args)
    if not args.compare:
        for name in args.models:
            train_one(name, images, args)
        return 0
    command = shlex.join(["python", "recipes/finetune_image.py", *(sys.argv[1:] if argv is None else argv)])
    about = environment(args.device, command, vars(args))
    rows = [row for row in earlier_rows(args.output_dir / "image.json", about) if row.model not in args.models]
    for name in args.models:
        rows += measure_model(name, images, args, command)
        record = {**about, "images": images.name, "rows": [asdict(row) for row in rows]}
        replace_text(args.output_dir / "image.json", json.dumps(record, indent=2) + "\n")
        replace_text(args.output_dir / "image.md", markdown(rows, images, args, about))
    print(markdown(rows, images, args, about))
    return 0


if __name__ == "__main__":
    sys.exit(main())
