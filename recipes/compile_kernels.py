"""Compile every Triton kernel ahead of time, without a GPU, and write down what the compilers made of it.

    python recipes/compile_kernels.py                                  # all architectures: recipes/results/aot/
    python recipes/compile_kernels.py --name rms_norm_bwd              # these again, the others' rows as they are
    python recipes/compile_kernels.py --capability 90 --dtype bfloat16 --out /tmp/aot

The launchers run on CPU samples; instead of a launch the kernel is compiled for the target. The table has registers,
shared memory and spills (machine code) and how wide accesses to memory are (PTX). Needs triton, with its `cuobjdump`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from itertools import islice, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# read when triton is imported
os.environ["TRITON_INTERPRET"] = "0"

import torch
from tqdm import tqdm

from hf_actcompress.kernels import KERNELS
from hf_actcompress.kernels import launch as cached

CAPABILITIES = (80, 86, 89, 90, 120)
DTYPES = ("bfloat16", "float32")
# rows and width of a hidden state; the width is divisible as hidden sizes are
ROWS, WIDTH = 64, 4096
# the widths that models have, for kernels whose tiles depend on the width
WIDTHS = (768, 1024, 2048, 3072, 4096, 5120, 8192, 12288, 16384)
# modules whose tiles depend on a width: of a norm's row, of a row with one scale of few-bit codes, of a token's heads,
# of a row with one group, of the vocabulary
_SIZED = {
    "kernels.layer_norm", "kernels.rms_norm", "kernels.rope", "kernels.float8", "kernels.int_group",
    "kernels.linear_cross_entropy", "methods.norm_output.kernel", "methods.fewbit.kernel",
}  # fmt: skip
BY_WIDTH = frozenset(name for name, module in KERNELS.items() if module in _SIZED)
OUT = Path(__file__).parent / "results" / "aot"
# the fewest bytes that a wide access moves
WIDE_BYTES = 16
_ACCESS = re.compile(r"\b(ld|st)\.global(?:\.(?!v\d|[bfsu]\d)[\w:]+)*(?:\.v(\d))?\.[bfsu](\d+)")
# copies from global to shared memory, past the registers
_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\S* \[[^]]*\], \[[^]]*\], (0x[0-9a-f]+|\d+)")
# an instruction of the machine code, without the NOPs that fill up its end
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?!NOP\b)\S", re.MULTILINE)
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True)
class Row:
    """One kernel as compiled for one architecture, or the worst of its builds.

    Attributes:
        name: The function of the package that launches it.
        kernel: The kernel's own name.
        options: Its compile-time options; of several builds those of the one with the narrowest accesses.
        dtype: Dtype of the tensors that it was launched for.
        capability: Compute capability of the target, 10 * major + minor.
        warps, shared_bytes: Figures per block.
        registers: Figure per thread.
        spilled_bytes: Bytes per thread in local memory and on the stack.
        loads, stores: Instructions on global memory by the bytes that each moves per thread.
        builds: The number of builds.
        widths: Widths of the rows that it was compiled for, where its tiles depend on them.
        widest: The share of wide accesses in the build that has most of them.
        instructions: Instructions of the machine code; without loops, a thread runs each of them once.
    """

    name: str
    kernel: str
    options: dict[str, Any]
    dtype: str
    capability: int
    warps: int
    registers: int
    shared_bytes: int
    spilled_bytes: int
    loads: dict[int, int]
    stores: dict[int, int]
    builds: int = 1
    widest: float = 0.0
    widths: tuple[int, ...] = ()
    instructions: int = 0

    @property
    def wide_share(self) -> float:
        """The share of the bytes that is moved by instructions of 16 bytes or more."""
        moved = Counter(self.loads) + Counter(self.stores)
        total = sum(size * count for size, count in moved.items())
        return sum(size * count for size, count in moved.items() if size >= WIDE_BYTES) / max(total, 1)


class _Target:
    """A GPU for which kernels are compiled, and on which none is launched."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        # a key per target, or this process would use a kernel that was compiled for another target
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def _compiling(capability: int) -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    """Launches inside compile for that target; yields (compiled kernel, launch options), each kernel once."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compiled: list[tuple[Any, dict[str, Any]]] = []
    seen: set[str] = set()
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        made = run(kernel, *args, grid=grid, warmup=True, **options)
        if made.hash not in seen:
            seen.add(made.hash)
            compiled.append((made, options))
        return made

    driver.set_active(_Target(capability))
    JITFunction.run, cached.enabled = compile_only, False
    try:
        yield compiled
    finally:
        JITFunction.run, cached.enabled = run, True


def usage(cubin: bytes) -> tuple[int, int, int, int]:
    """Registers, shared bytes, spilled bytes and instructions of a kernel's machine code."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", "--dump-sass", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = _USAGE.search(text)
    assert found, text
    registers, stack, shared, local = map(int, found.groups())
    return registers, shared, stack + local, len(_INSTRUCTION.findall(text))


def accesses(ptx: str) -> tuple[dict[int, int], dict[int, int]]:
    """Loads and stores of global memory in PTX: bytes per thread and instruction -> how many instructions."""
    loads, stores = Counter[int](), Counter[int]()
    for kind, lanes, bits in _ACCESS.findall(ptx):
        (loads if kind == "ld" else stores)[int(lanes or 1) * int(bits) // 8] += 1
    loads.update(int(size, 0) for size in _COPY.findall(ptx))
    return dict(sorted(loads.items())), dict(sorted(stores.items()))


def compile_kernel(
    name: str, dtype: str, capability: int, samples: int | None, widths: Sequence[int] = WIDTHS
) -> list[Row]:
    """Every build of a kernel that its first `samples` samples reach, all of them for None."""
    module = importlib.import_module(f"hf_actcompress.{KERNELS[name]}")
    widths = tuple(widths) if name in BY_WIDTH else ()
    with _compiling(capability) as compiled:
        # trials for another target do not hold
        if hasattr(module, "forget"):
            module.forget()
        # kernels compute fp32 products in tf32 where torch may do so
        precisions = ("highest", "high") if dtype == "float32" else ("highest",)
        for precision, width in product(precisions, widths or (WIDTH,)):
            torch.set_float32_matmul_precision(precision)
            torch.manual_seed(0)
            arguments = module.SAMPLES[name](torch.device("cpu"), getattr(torch, dtype), ROWS, width)
            on_trial = getattr(module, "ON_TRIAL", {})
            for args in islice(arguments, samples):
                getattr(module, name)(*args)
                if name in on_trial:
                    on_trial[name](*args)
    rows = []
    for made, launch in compiled:
        assert made.metadata.target.arch == capability, "triton took what it had compiled for another one"
        registers, shared, spilled, count = usage(made.asm["cubin"])
        options = {key: str(value) for key, value in launch.items() if key.isupper()}
        warps = made.metadata.num_warps
        loads, stores = accesses(made.asm["ptx"])
        shared = max(shared, made.metadata.shared)
        row = Row(name, made.name, options, dtype, capability, warps, registers, shared, spilled, loads, stores)
        rows.append(replace(row, widest=round(row.wide_share, 3), widths=widths, instructions=count))
    return rows


def worst(builds: list[Row]) -> Row:
    """The worst figure of each kind, and the options of the build with the narrowest accesses."""
    names = ("warps", "registers", "shared_bytes", "spilled_bytes", "widest", "instructions")
    largest = {name: max(getattr(row, name) for row in builds) for name in names}
    largest["builds"] = sum(row.builds for row in builds)
    return replace(min(builds, key=lambda row: row.wide_share), **largest)


def grouped(rows: list[Row], *by: str) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(getattr(row, name) for name in by)].append(row)
    return dict(sorted(groups.items()))


def table(rows: list[Row]) -> str:
    """Markdown: per function and dtype, the worst of its builds on each architecture."""
    capabilities = sorted({row.capability for row in rows})
    lines = [
        f"Compiled ahead of time by triton {metadata.version('triton')} with `python recipes/compile_kernels.py`; per",
        "architecture: registers per thread / shared bytes per block / spilled bytes per thread, the largest of a",
        "function's builds; wide: of the bytes that its loads and stores move, the share in instructions of 16 bytes",
        "or more per thread, the smallest and the largest of its builds on any architecture. Functions with a * have",
        f"other blocks for other widths: compiled for {', '.join(map(str, WIDTHS[:-1]))} and {WIDTHS[-1]}.",
        "",
        "| function | dtype | builds | " + " | ".join(f"sm_{c}" for c in capabilities) + " | wide |",
        "|---|---|---|" + "---|" * len(capabilities) + "---|",
    ]
    for (name, dtype), group in grouped(rows, "name", "dtype").items():
        cells = {}
        for (capability,), own in grouped(group, "capability").items():
            row = worst(own)
            cells[capability] = f"{row.registers} / {row.shared_bytes} / {row.spilled_bytes}"
        columns = " | ".join(cells.get(capability, "") for capability in capabilities)
        overall = worst(group)
        wide = dict.fromkeys((f"{overall.wide_share:.0%}", f"{overall.widest:.0%}"))
        name += " *" * bool(overall.widths)
        lines.append(f"| {name} | {dtype} | {overall.builds // len(cells)} | {columns} | {' to '.join(wide)} |")
    return "\n".join(lines) + "\n"


def kept(path: Path, made: set[tuple[str, str, int]]) -> list[Row]:
    """Rows of an earlier run with the same compiler, without those that this run has measured again."""
    if not path.exists():
        return []
    earlier = json.loads(path.read_text())
    if earlier["triton"] != metadata.version("triton"):
        return []
    rows = []
    for row in earlier["kernels"]:
        for accesses in ("loads", "stores"):
            row[accesses] = {int(size): count for size, count in row[accesses].items()}
        rows.append(Row(**{key: value for key, value in row.items() if key != "wide"}))
    return [row for row in rows if row.name in KERNELS and (row.name, row.dtype, row.capability) not in made]


def entry(row: Row) -> dict[str, Any]:
    """A row as kernels.json has it."""
    found = {**asdict(row), "wide": round(row.wide_share, 3)}
    return {key: value for key, value in found.items() if value or key not in ("widths", "instructions")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, nargs="+", default=CAPABILITIES, help="10 * major + minor")
    parser.add_argument("--dtype", nargs="+", default=DTYPES, choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--name", nargs="+", default=sorted(KERNELS), choices=sorted(KERNELS))
    parser.add_argument("--samples", type=int, help="of each function, instead of all")
    parser.add_argument("--width", type=int, nargs="+", default=WIDTHS, help="where blocks depend on it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--out", type=Path, default=OUT, help="where kernels.json and kernels.md go")
    args = parser.parse_args()
    jobs = [(*job, args.samples, args.width) for job in product(args.name, args.dtype, args.capability)]
    rows: list[Row] = []
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        columns = zip(*jobs, strict=True)
        done = pool.map(compile_kernel, *columns) if args.jobs > 1 else map(compile_kernel, *columns)
        for found in tqdm(done, total=len(jobs), desc="compiled", disable=None):
            rows += found
    args.out.mkdir(parents=True, exist_ok=True)
    rows += kept(args.out / "kernels.json", {job[:3] for job in jobs})
    rows = [worst(builds) for builds in grouped(rows, "name", "kernel", "dtype", "capability").values()]
    lines = ",\n".join(json.dumps(entry(row)) for row in rows)
    header = json.dumps({"triton": metadata.version("triton")})[:-1]
    (args.out / "kernels.json").write_text(f'{header}, "kernels": [\n{lines}\n]}}\n')
    (args.out / "kernels.md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
