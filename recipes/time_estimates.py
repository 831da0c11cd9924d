"""How long `hf-actcompress estimate` takes, in seconds of process time, beyond the imports of torch and transformers.

    python recipes/time_estimates.py [--runs 5]

Each run is a process of its own that estimates one model from nothing: no cache is kept between them. The models take
turns, and of each the smallest figures count, because other programs on the machine only add to them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

MODELS = {
    "llama-8b": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 8192, "dtype": "bfloat16",
    },
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
    "bert-base": {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
}  # fmt: skip
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
sizes = ["--batch-size", "2", "--seq-len", "512", "--gpu", "80GB"]
app(["estimate", sys.argv[1], "--no-cache", *sizes], standalone_mode=False)
# the names of the columns are printed with the first row
from hf_actcompress.cli.strategies import DEFAULT
print(json.dumps([start, lines[1], lines[len(DEFAULT)], lines[-1]]), file=out)
"""


def timed(config: Path) -> list[float]:
    """Seconds until the imports were done, until the first row, until the last row, and until all was printed."""
    done = subprocess.run([sys.executable, "-c", RUN, str(config)], capture_output=True, text=True)
    if not done.stdout:
        raise SystemExit(done.stderr)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / f"{name}.json" for name in MODELS}
        for name, path in paths.items():
            path.write_text(json.dumps(MODELS[name]))
        found: dict[str, list[list[float]]] = {name: [] for name in MODELS}
        for _ in range(runs):
            for name, path in paths.items():
                found[name].append(timed(path))
    print(f"{'model':<12}{'torch, transformers':>22}{'first row':>12}{'all rows':>12}{'all':>12}")
    for name, times in found.items():
        imports, first, rows, whole = map(min, zip(*times, strict=True))
        print(f"{name:<12}{imports:>22.2f}{first:>12.2f}{rows:>12.2f}{whole:>12.2f}")


if __name__ == "__main__":
    main()
