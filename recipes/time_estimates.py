"""How long `hf-actcompress estimate` takes, in seconds of process time.

The whole estimate is timed beyond the imports of torch and transformers; that of peft, which LoRA needs, counts.
`--quick`, the formula, imports none of them; it is timed from the start of Python to the end of the command.

    python recipes/time_estimates.py --out recipes/results/estimates [--runs 5]

Each run is a process of its own that estimates one model from nothing: no cache is kept between them. The models take
turns, and of each the smallest figures count, because other programs on the machine only add to them. Python keeps the
bytecode of what it imports, as it does for a user, so the first run of each is slower than the others. Writes
time_estimates.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.files import replace_text
from common.versions import about_here

MODELS = {
    "llama-8b": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 8192, "dtype": "bfloat16",
    },
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
    "bert-base": {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
}  # fmt: skip
COLUMNS = ("torch, transformers", "first row", "all rows", "all", "--quick, with Python's start")
SIZES = ("--batch-size", "2", "--seq-len", "512")
# name of the row -> model and options: on the first card some strategies fit, on the second all of them, and the model
# with all its weights trained fits on no card of 24 GB, so that the command looks for changes of the training as well
CASES = {
    "llama-8b": ("llama-8b", ("--gpu", "80GB")),
    "llama-8b, QLoRA, 24 GB": ("llama-8b", ("--qlora", "--gpu", "24GB")),
    "llama-8b, 24 GB": ("llama-8b", ("--gpu", "24GB")),
    "gpt2": ("gpt2", ("--gpu", "80GB")),
    "bert-base": ("bert-base", ("--gpu", "80GB")),
}
# seconds up to here, and the time of each line of the command's output
RUN = """
import importlib, json, sys, time
import torch, transformers
importlib.import_module("transformers.modeling_utils")
start, lines = time.process_time(), []
class Timed:
    encoding = "utf-8"
    def write(self, text):
        lines.extend([time.process_time() - start] * text.count("\\n"))
    def flush(self): pass
    def isatty(self): return False
out, sys.stdout = sys.stdout, Timed()
from hf_actcompress.cli import app
app(["estimate", "--no-cache", *sys.argv[1:]], standalone_mode=False)
# the names of the columns are printed with the first row
from hf_actcompress.cli.strategies import DEFAULT
print(json.dumps([start, lines[1], lines[len(DEFAULT)], lines[-1]]), file=out)
"""

QUICK = """
import json, sys, time
from hf_actcompress.cli import app
app(["estimate", "--quick", *sys.argv[1:]], standalone_mode=False)
assert "torch" not in sys.modules
print(json.dumps([time.process_time()]))
"""


def timed(config: Path, options: Sequence[str]) -> list[float]:
    """Seconds of the imports, of the first row, of all rows, and of all that is printed; and of the formula."""
    return [*_run(RUN, config, options), *_run(QUICK, config, options)]


def _run(code: str, config: Path, options: Sequence[str]) -> list[float]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code, str(config), *SIZES, *options]
    done = subprocess.run(command, capture_output=True, text=True, env=kept)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def markdown(found: Mapping[str, Sequence[float]], about: Mapping[str, Any]) -> str:
    lines = [
        f"`{about['command']}`",
        "",
        f"{about['device']}, torch {about['torch']}, transformers {about['transformers']}",
        "",
        f"| {' | '.join(('model', *COLUMNS))} |",
        "|---" * (1 + len(COLUMNS)) + "|",
    ]
    lines += [f"| {name} | {' | '.join(f'{x:.2f} s' for x in times)} |" for name, times in found.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/estimates"))
    args = parser.parse_args()
    runs: dict[str, list[list[float]]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / f"{name}.json" for name in MODELS}
        for name, path in paths.items():
            path.write_text(json.dumps(MODELS[name]))
        for _ in range(args.runs):
            for name, (model, options) in CASES.items():
                runs[name].append(timed(paths[model], options))
    found = {name: list(map(min, zip(*times, strict=True))) for name, times in runs.items()}
    about = {"command": shlex.join(["python", "recipes/time_estimates.py", *sys.argv[1:]]), **about_here()}
    replace_text(args.out / "time_estimates.json", json.dumps({**about, "runs": runs}, indent=2) + "\n")
    replace_text(args.out / "time_estimates.md", markdown(found, about))
    print(markdown(found, about))


if __name__ == "__main__":
    main()
