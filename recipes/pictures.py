"""Draw the pictures of `recipes/results` from the data beside them, without measuring anything.

    python recipes/pictures.py           # after a change of how a picture is drawn, or of its data
    python recipes/pictures.py --check   # fails where a picture shows other data than lie beside it

The picture of the front README is made of three runs on one GPU: the modes of `_README` in this order.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from common.bench_report import plot as plot_benchmark
from common.bench_report import read
from common.drawing import KEY, bars, digest, head, legend, save
from common.evaluation_report import plot as plot_evaluation
from common.paper_report import Row, plot
from common.report import plot as plot_comparison
from longest_context import Way, draw, parse_args

RESULTS = Path(__file__).parent / "results"
_GPU = RESULTS / "gpu"
# folder of a run -> modes
_README = {
    "llama-1b": ("stock", "liger", "exact", "int8"),
    "llama-1b-compiled": ("compile", "exact+compile", "int8+compile"),
    "llama-1b-checkpointing": ("exact+checkpointing", "liger+checkpointing"),
}
_SESSIONS = (
    "Three runs. Those with checkpointing are of an earlier session, in which exact alone took {:.2f} of stock's time."
)


def readme_picture(path: Path, *sources: Path) -> None:
    """Peak and step time of Llama-3.2-1B on a GPU, by mode."""
    from matplotlib.figure import Figure

    chosen = [row for source, modes in zip(sources, _README.values(), strict=True)
              for row in read(source) if row.mode in modes]  # fmt: skip
    names = [row.mode for row in chosen]
    figure = Figure(figsize=(9, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    bars(left, "peak above weights and gradients, GiB", names, [(row.peak_mib or 0) / 1024 for row in chosen], ".1f")
    bars(right, "time of a step, stock = 1", names, [row.step_ratio or 0 for row in chosen], ".2f")
    head(figure, "Llama-3.2-1B, 2 x 2,048 tokens, bfloat16, NVIDIA H200")
    earlier = next(row for row in read(sources[-1]) if row.mode == "exact")
    legend(figure, names, _SESSIONS.format(earlier.step_ratio))
    save(figure, path, *sources)


def _benchmark(path: Path, source: Path) -> None:
    plot_benchmark(read(source), path, json.loads(source.read_text().splitlines()[0]))


def _evaluation(path: Path, *sources: Path) -> None:
    plot_evaluation(path.parent)


def _longest(path: Path, source: Path) -> None:
    record = json.loads(source.read_text())
    found = record["ways"]
    sizes = ("device_bytes", "kept_bytes")
    ways = [{**way, **{name: {int(n): size for n, size in way[name].items()} for name in sizes}} for way in found]
    args = parse_args(shlex.split(record["command"])[2:])
    draw([Way(**{name: way[name] for name in Way.__annotations__}) for way in ways], path, source, args)


def _reproduce(path: Path, source: Path) -> None:
    plot([Row(**row) for row in json.loads(source.read_text())["rows"]], path, source)


def pictures() -> Iterator[tuple[Path, tuple[Path, ...], Callable[..., None]]]:
    """Each picture, the files that it shows, and what draws it."""
    yield RESULTS / "readme/llama-1b.png", tuple(_GPU / run / "benchmark.jsonl" for run in _README), readme_picture
    for path in sorted(RESULTS.rglob("benchmark.png")):
        yield path, (path.with_suffix(".jsonl"),), _benchmark
    for path in sorted(RESULTS.rglob("compare.png")):
        yield path, (path.with_suffix(".json"),), plot_comparison
    for path in sorted(RESULTS.rglob("evaluation.png")):
        yield path, tuple(sorted(path.parent.glob("evaluation-*.json"))), _evaluation
    longest, reproduced = RESULTS / "longest_context/longest_context.png", RESULTS / "reproduce/reproduce.png"
    yield longest, (longest.with_suffix(".json"),), _longest
    yield reproduced, (reproduced.with_suffix(".json"),), _reproduce


def outdated() -> list[Path]:
    """Pictures that show other data than lie beside them."""
    from PIL import Image

    return [
        path for path, sources, _ in pictures()
        if not path.exists() or Image.open(path).info.get(KEY) != digest(*sources)
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Draw, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="draw nothing; exit status 1 if a picture is outdated")
    args = parser.parse_args(argv)
    if args.check:
        found = outdated()
        print("\n".join(f"shows other data: {path}" for path in found))
        return 1 if found else 0
    for path, sources, draw_it in pictures():
        draw_it(path, *sources)
    return 0


if __name__ == "__main__":
    sys.exit(main())
