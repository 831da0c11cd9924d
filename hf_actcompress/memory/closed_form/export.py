"""Traces every case of the table and writes `quick/data/`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from ...config import CompressionConfig, resolve
from ...modules.tiled import draws
from ...quick.formula import tile_of
from ...quick.strategies import STRATEGIES
from ...records import storage_sizes
from ..estimation.fake_step.ready import mlps_of, ready
from ..estimation.fake_step.setting import Setting
from ..estimation.meta_model import skeleton
from ..estimation.states.held import CONTEXT_BYTES
from ..estimation.states.optimizers import OPTIMIZERS
from .probes import FAMILIES, HEAD, left_over, probe, sizes_of
from .pruning import points, pruned, shortened
from .symbols import SYMBOLS, Polynomial, Reader
from .traces import FEWEST, SymbolicTrace, by_layers, symbolic_trace

DATA = Path(__file__).parents[2] / "quick" / "data"

# fields of configs on which bytes depend, and which the formula can only use with the values that were traced
STRUCTURE = (
    "hidden_act", "activation_function", "attention_bias", "mlp_bias", "attention_dropout", "hidden_dropout_prob",
    "attention_probs_dropout_prob", "classifier_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "is_decoder",
    "add_cross_attention", "reorder_and_upcast_attn", "use_sliding_window", "hidden_activation",
    "final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention", "activation", "dropout",
    "seq_classif_dropout", "decoder_sparse_step", "mlp_only_layers", "output_router_logits",
)  # fmt: skip
# the optimizers that the formula knows
_OPTIMIZERS = ["adamw", "adamw_32bit", "adamw_8bit", "adafactor", "sgd_momentum", "sgd"]
# further fields of configs that the formula reads
_READ = ("tie_word_embeddings", "sliding_window", "use_sliding_window")

# name -> (dtype of the weights, dtype of autocast, whether there is LoRA, quantisation)
MODES: dict[str, tuple[torch.dtype, torch.dtype | None, bool, str | None]] = {
    "fp32": (torch.float32, None, False, None),
    "bf16": (torch.bfloat16, None, False, None),
    "autocast": (torch.float32, torch.bfloat16, False, None),
    "lora": (torch.bfloat16, None, True, None),
    "qlora": (torch.bfloat16, None, True, "nf4"),
    "int8": (torch.bfloat16, None, True, "int8"),
}


class Writer:
    """Numbers terms and sums; equal ones get the same number. It may continue with the data of a class.

    Its attributes are the tables of the data.
    """

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        data = data or {}
        self.terms: list[dict[str, int]] = data.get("terms", [])
        self.sums: list[list[float]] = data.get("sums", [])
        self.states: list[dict[str, int]] = data.get("states", [])
        self.steps: list[dict[str, Any]] = data.get("steps", [])

    def number(self, found: Any, known: list[Any]) -> int:
        if found not in known:
            known.append(found)
        return known.index(found)

    def polynomial(self, polynomial: Polynomial) -> int:
        """The number of a sum, which is stored as the number of each term followed by its coefficient."""
        row: list[float] = []
        for term, coefficient in sorted(polynomial.items()):
            powers = {name: power for name, power in zip(SYMBOLS, term, strict=True) if power}
            value = float(f"{float(coefficient):.7g}")
            row += [self.number(powers, self.terms), int(value) if value.is_integer() else value]
        return self.number(row, self.sums)


def export(
    name: str,
    modes: Sequence[str] = tuple(MODES),
    strategies: Sequence[str] = tuple(STRATEGIES),
    known: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The data of one class for these modes and strategies; all other cases are those of `known`."""
    family, writer = FAMILIES[name], Writer(known)
    cases: dict[str, Any] = dict(known["cases"]) if known else {}
    for flavour in family.flavours:
        for grouped in family.grouped:
            for mode, windowed in product(modes, (False, True) if family.period else (False,)):
                found = dict(_cases(name, flavour, grouped, mode, windowed, strategies, writer))
                key = f"{flavour}/{'grouped' if grouped else 'single'}/{mode}"
                key = f"{key}/windowed" if windowed else key
                cases[key] = {**cases.get(key, {}), **found}
    return {**described(name), **vars(writer), "cases": cases}


def _cases(
    name: str, flavour: str, grouped: bool, mode: str, windowed: bool, strategies: Sequence[str], writer: Writer
) -> Iterator[tuple[str, tuple[int, ...]]]:
    family = FAMILIES[name]
    # without windows, too, layers take turns: behind one whose output is recomputed, the next one's is kept
    period = family.period if windowed else min(max(family.period, 1), 2)
    sizes = sizes_of(family, grouped)
    reader, at = Reader(sizes, left_over(sizes)), points(grouped, "kv_heads" not in family.fields)
    many: list[Mapping[str, float]] = [{**point, **tiled} for point in at if (tiled := tile_of(point))]
    dtype, autocast, lora, quantization = MODES[mode]
    rank = sizes["rank"].value if lora else None
    configs = [probe(name, flavour, grouped, period * (FEWEST + more), windowed) for more in (0, 1)]
    plain = [skeleton(config, dtype, rank, False, quantization) for config in configs]
    checkpointed = [skeleton(model, None, None, True) for model in plain]
    state = writer.number(_state(plain, reader, writer, period), writer.states)
    setting = Setting(sizes["batch"].value, sizes["seq"].value, None, True, autocast)
    # MLPs that draw have tiles only where these are asked for
    tiles = not any(map(draws, mlps_of(ready(plain[0], setting, roles=False), setting)))
    for strategy in strategies:
        preset, checkpointing, codec = STRATEGIES[strategy][:3]
        short, longer = checkpointed if checkpointing else plain
        found = []
        for config, where in zip(
            _configs(preset, checkpointing and tiles, codec, sizes["tile"].value), (at, many), strict=False
        ):
            trace = symbolic_trace(short, longer, replace(setting, config=config), reader, period)
            found.append(writer.number(_step(trace, where, writer), writer.steps))
        yield strategy, (state, *found)


def _configs(preset: str | None, tiles: bool, codec: str | None, tile: int) -> list[CompressionConfig | None]:
    """The config; where `tiles` says that many rows get tiles by default, first without tiles and then with them."""
    if preset is None:
        return [None]
    config = resolve(preset) if codec is None else CompressionConfig.from_preset(preset, checkpoint_input=codec)
    if config.always_in_tiles:
        return [replace(config, tiled_mlp=tile)]
    return [replace(config, tiled_mlp=rows) for rows in ((0, tile) if tiles else (0,))]


def _step(found: SymbolicTrace, at: Sequence[Mapping[str, float]], writer: Writer) -> dict[str, Any]:
    kept = {role: writer.polynomial(shortened(polynomial, at)) for role, polynomial in found.kept.items()}
    return {"kept": kept, "moments": [writer.polynomial(moment) for moment in pruned(found.moments, at)]}


def _state(models: Sequence[nn.Module], reader: Reader, writer: Writer, period: int) -> dict[str, int]:
    """Polynomials of the weights, the gradients, and each optimizer's states."""
    parts: list[dict[str, Polynomial]] = []
    for model in models:
        trained = [p for p in model.parameters() if p.requires_grad]
        weights = storage_sizes(chain(model.parameters(), model.buffers())).values()
        optimizers = {name: OPTIMIZERS[name].of_model(model) for name in _OPTIMIZERS}
        sizes = {"weights": weights, "gradients": [p.nbytes for p in trained], **optimizers}
        parts.append({part: reader.total(found) for part, found in sizes.items()})
    short, longer = parts
    growth = {part: longer[part].plus(short[part], -1) for part in short}
    return {part: writer.polynomial(by_layers(short[part], growth[part], period)) for part in short}


def described(name: str) -> dict[str, Any]:
    """A description of what was traced: the versions, the fields of a config, and the defaults of missing fields."""
    family = FAMILIES[name]
    stated = {field: getattr(family.config, field, None) for field in [*family.fields.values(), *_READ]}
    config = probe(name, next(iter(family.flavours)), False, FEWEST)
    with_default = {field for field in stated if hasattr(family.config, field)}
    structure = {field: getattr(config, field) for field in STRUCTURE if hasattr(config, field)}
    if family.period > 1:
        structure["sliding_window_pattern"] = family.period
    return {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "context_bytes": CONTEXT_BYTES,
        "optimizers": _OPTIMIZERS,
        "model_type": family.config.model_type,
        "task": family.task,
        "learned_positions": family.learned_positions,
        "reserved": family.reserved,
        "period": family.period,
        "tile": family.tile,
        # None if heads of several sizes were traced; otherwise the only size
        "head": None if "head" in family.fields else HEAD,
        "fields": dict(family.fields),
        "defaults": {field: value for field, value in stated.items() if field in with_default},
        "structure": structure,
        "flavours": {flavour: dict(options) for flavour, options in family.flavours.items()},
    }


def write(name: str, folder: Path, modes: Sequence[str] = (), strategies: Sequence[str] = ()) -> None:
    """Trace a class and write its file; with some modes or strategies, replace only these in the file."""
    # before the traces, which take minutes
    folder.mkdir(parents=True, exist_ok=True)
    file, known = folder / f"{name}.json", None
    if modes or strategies:
        known = json.loads(file.read_text(encoding="utf-8"))
    found = export(name, modes or tuple(MODES), strategies or tuple(STRATEGIES), known)
    file.write_text(json.dumps(without_unused(found), separators=(",", ":")) + "\n", encoding="utf-8")


def without_unused(data: dict[str, Any]) -> dict[str, Any]:
    """The same data without states, steps, sums and terms that no case uses any more, and with new numbers."""
    writer = Writer()
    cases: dict[str, dict[str, tuple[int, ...]]] = {}

    def sums(number: int) -> int:
        row = data["sums"][number]
        terms = (writer.number(data["terms"][term], writer.terms) for term in row[::2])
        return writer.number([x for pair in zip(terms, row[1::2], strict=True) for x in pair], writer.sums)

    for key, found in data["cases"].items():
        cases[key] = {}
        for strategy, (state, *steps) in found.items():
            parts = {part: sums(number) for part, number in data["states"][state].items()}
            new = [
                {
                    "kept": {role: sums(number) for role, number in data["steps"][step]["kept"].items()},
                    "moments": [sums(number) for number in data["steps"][step]["moments"]],
                }
                for step in steps
            ]
            state = writer.number(parts, writer.states)
            cases[key][strategy] = (state, *(writer.number(step, writer.steps) for step in new))
    return {**data, **vars(writer), "cases": cases}
