"""`python -m tests.quick.reference` writes what `estimate` says about the cases below to reference.json.

It takes some minutes. The test of the formula reads the file, and computes a few of the cases again each day.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_actcompress.quick import page

FILE = Path(__file__).with_name("reference.json")
PRESETS: dict[str, Any] = json.loads((Path(page.__file__).parent / "presets.json").read_text())
STRATEGIES: dict[str, Any] = json.loads((Path(page.__file__).parent / "strategies.json").read_text())
MODES: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "autocast": {"dtype": "float32", "autocast": "bfloat16"},
    "lora": {"dtype": "bfloat16", "lora": 16},
    "qlora": {"dtype": "bfloat16", "lora": 16, "quantization": "nf4"},
    "int8": {"dtype": "bfloat16", "lora": 16, "quantization": "int8"},
}
# (batch, tokens), from smaller than usual to larger
LONG = ((1, 4096), (4, 2048), (16, 512), (2, 128), (8, 1000), (4, 8192))
SHORT = ((16, 512), (64, 128), (1, 100), (32, 384))
OPTIMIZERS = ("adamw", "adamw_8bit", "adafactor", "adamw_32bit")


def cases() -> Iterator[dict[str, Any]]:
    """Each model in two of the modes, with strategies, batches and optimizers in turn."""
    number = 0
    for name, config in PRESETS.items():
        learned = "max_position_embeddings" not in config or config["max_position_embeddings"] <= 1024
        for mode in list(MODES)[len(name) % 3 :: 3]:
            sizes = (SHORT if learned else LONG)[number % (4 if learned else 6)]
            strategy = list(STRATEGIES)[number * 3 % len(STRATEGIES)]
            optimizer = OPTIMIZERS[number // 3 % 4]
            yield {
                "model": name, "mode": mode, "strategy": strategy, "optimizer": optimizer,
                "batch_size": sizes[0], "seq_len": sizes[1],
            }  # fmt: skip
            number += 1


def estimated(case: dict[str, Any]) -> dict[str, int]:
    """What `estimate` says about a case."""
    from hf_actcompress import CompressionConfig, estimate
    from hf_actcompress.memory.closed_form.probes import FAMILIES

    config = PRESETS[case["model"]]
    preset, checkpointing, codec = STRATEGIES[case["strategy"]][:3]
    found = estimate(
        FAMILIES[config["architectures"][0]].config(**config),
        batch_size=case["batch_size"],
        seq_len=case["seq_len"],
        config=preset if codec is None else CompressionConfig.from_preset(preset, checkpoint_input=codec),
        gradient_checkpointing=checkpointing,
        optimizer=case["optimizer"],
        **MODES[case["mode"]],
    )
    return {
        "device_bytes": found.device_bytes,
        "step_peak_bytes": found.step_peak_bytes,
        "kept_bytes": found.kept_bytes,
    }


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    lines = [json.dumps({**case, **estimated(case)}) for case in cases()]
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
