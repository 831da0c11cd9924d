"""Every Triton kernel: right first, then how close to the memory's speed, beside torch's reference and Liger's kernel.

    python recipes/benchmark_kernels.py --device cuda --out results/
    python recipes/benchmark_kernels.py --quick                          # a CPU: Triton's interpreter, no speeds

Sizes are those of Llama-3.2-1B in training: 16384 tokens, hidden 2048, MLP 8192. "of copy" is the achieved bandwidth
(bytes of arguments and results over the median time) over that of a plain copy in the same run. A kernel that
disagrees with the reference gets no figure, and the command fails. Writes kernels.jsonl and kernels.md.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from hf_actcompress import reference
from hf_actcompress.kernels import KERNELS

TOKENS, HIDDEN, MLP, VOCAB, HEADS = 16384, 2048, 8192, 32064, 32
PACKAGES = ("torch", "triton", "liger-kernel", "hf-actcompress")
MIB = 2**20
COLUMNS = (
    "kernel", "case", "correct", "MiB moved", "ms", "GiB/s", "of copy", "reference ms", "x reference", "Liger ms",
    "x Liger",
)  # fmt: skip

Args = tuple[Any, ...]
Functions = Callable[[str], Callable[..., Any]]


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Args:
        name: A row of KERNELS.
        label: What distinguishes it from the name's other lines.
        mlp: Whether its rows are as wide as the MLP, else as the hidden state.
        arguments: Which of the module's samples; or what makes the arguments.
        run: What is timed, from a choice of implementations and the arguments; by default a call of `name`.
        bandwidth: Whether memory is what bounds it; a matrix product inside is not.
    """

    name: str
    label: str = ""
    mlp: bool = False
    arguments: Callable[..., Any] | None = None
    run: Callable[[Functions, Args], Any] | None = None
    bandwidth: bool = True


@dataclass
class Result:
    """A case measured. Times in ms; None where nothing was measured."""

    kernel: str
    label: str
    correct: bool
    moved_mib: float
    ms: float | None = None
    gib_per_second: float | None = None
    of_copy: float | None = None
    reference_ms: float | None = None
    liger_ms: float | None = None
    note: str = ""


def of(*wanted: Any) -> Callable[[Args], bool]:
    """The sample that has these among its arguments that are no tensors."""
    return lambda args: all(any(type(a) is type(w) and a == w for a in args) for w in wanted)


def heads(device: torch.device, dtype: torch.dtype, tokens: int, width: int) -> Args:
    """A query as attention has it: heads before tokens, a view of a projection."""
    q = torch.randn(1, tokens, HEADS, max(width // HEADS, 1), device=device).to(dtype).transpose(1, 2)
    return q, 8, 64, False, None


def head(device: torch.device, dtype: torch.dtype, tokens: int, width: int) -> Args:
    """Hidden states, a vocabulary, targets."""
    tokens, vocab = max(tokens // 4, 1), VOCAB if width == HIDDEN else 4 * width
    h, weight = torch.randn(tokens, width, device=device), torch.randn(vocab, width, device=device) * width**-0.5
    return h.to(dtype), weight.to(dtype), None, torch.randint(vocab, (tokens,), device=device), (), torch.float32


def forward_and_backward(functions: Functions, args: Args) -> Any:
    """The loss head as a training step has it, which Liger's forward does as a whole."""
    h, weight, bias, target, pointwise, _ = args
    losses, maximum, log_sum = functions("linear_cross_entropy_fwd")(*args)
    dlosses = torch.full_like(losses, 1 / len(losses))
    backward = functions("linear_cross_entropy_bwd")
    return losses, backward(dlosses, h, weight, bias, target, maximum, log_sum, pointwise, (True, True, False))


CASES = (
    Case("rms_norm_fwd", arguments=of("weight_after_cast")),
    Case("rms_norm_rebuild", arguments=of("weight_after_cast")),
    Case("rms_norm_bwd", arguments=of("weight_after_cast")),
    Case("rms_norm_output_bwd", arguments=of("weight_after_cast")),
    Case("layer_norm_bwd", arguments=lambda args: isinstance(args[-2], torch.Tensor)),
    Case("layer_norm_output_bwd", arguments=lambda args: isinstance(args[-2], torch.Tensor)),
    Case("activation_value", "gelu_new", mlp=True, arguments=of("gelu_new")),
    Case("activation_bwd", "gelu_new", mlp=True, arguments=of("gelu_new")),
    Case("activation_bwd", "relu_squared", mlp=True, arguments=of("relu_squared")),
    Case("activation_derivative", "gelu", mlp=True, arguments=of("gelu")),
    Case("activation_output_bits", "gelu", mlp=True, arguments=of("gelu")),
    Case("activation_output_bwd", "gelu", mlp=True, arguments=of("gelu")),
    Case("fewbit_codes", "gelu, 4 bits, values", mlp=True, arguments=of("gelu", 4)),
    Case("fewbit_bwd", "silu, 4 bits", mlp=True, arguments=of("silu", 4)),
    Case("gated_product", "silu", mlp=True, arguments=of("silu")),
    Case("gated_product_bwd", "silu", mlp=True, arguments=of("silu")),
    Case("gated_product_bwd", "gelu_tanh", mlp=True, arguments=of("gelu_tanh")),
    *(Case("int_group_pack", f"{b} bits", arguments=of(b, 64, False)) for b in (8, 4, 2)),
    Case("int_group_pack", "4 bits, stochastic", arguments=of(4, 64, True)),
    Case("int_group_pack", "8 bits, heads before tokens", arguments=heads),
    *(Case("int_group_unpack", f"{b} bits", arguments=of(b, 64)) for b in (8, 4, 2)),
    Case("float8_pack", "e4m3", arguments=of(torch.float8_e4m3fn, 128)),
    Case("float8_unpack", "e4m3", arguments=lambda args: args[0].dtype == torch.float8_e4m3fn and args[-1] == 128),
    Case("topk_unpack", "bit mask", arguments=of(True)),
    Case("topk_unpack", "index", arguments=of(False)),
    Case("topk_grad_weight", "bit mask", arguments=of(True), bandwidth=False),
    Case("linear_cross_entropy_fwd", arguments=head, bandwidth=False),
    Case("linear_cross_entropy_bwd", "with forward", arguments=head, run=forward_and_backward, bandwidth=False),
)
# what takes the four arguments of a sample, not one sample
MAKERS = (heads, head)


def arguments(case: Case, device: torch.device, dtype: torch.dtype, tokens: int, width: int) -> Args:
    torch.manual_seed(0)
    if case.arguments in MAKERS:
        made: Args = case.arguments(device, dtype, tokens, width)
        return made
    samples = module(case.name).SAMPLES[case.name](device, dtype, tokens, width)
    return next(args for args in samples if case.arguments is None or case.arguments(args))


def module(name: str) -> Any:
    return importlib.import_module(f"hf_actcompress.kernels.{KERNELS[name]}")


def kernels(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(module(name), name)
    return function


def specification(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(reference, name)
    return function


def tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from tensors(value)


def moved_bytes(*values: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors(values))


def liger(case: Case, args: Args) -> Callable[[], Any] | None:
    """Liger's kernel for the same result from the same tensors, or None. Some of them write into their arguments."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    of_liger = {
        "rms_norm_fwd": _liger_rms_norm_fwd,
        "rms_norm_bwd": _liger_rms_norm_bwd,
        "layer_norm_bwd": _liger_layer_norm_bwd,
        "gated_product": _liger_gated_product,
        "gated_product_bwd": _liger_gated_product_bwd,
        "activation_bwd": _liger_activation_bwd,
        "linear_cross_entropy_bwd": _liger_loss_head,
    }
    return of_liger[case.name](*args) if case.name in of_liger else None


def _liger(name: str) -> Any:
    return importlib.import_module(f"liger_kernel.ops.{name}")


def _liger_rms_norm_fwd(x: Any, weight: Any, eps: float, variant: str) -> Callable[[], Any]:
    forward = _liger("rms_norm").rms_norm_forward
    return lambda: forward(x, weight, eps, 0.0, "llama", None)


def _liger_rms_norm_bwd(dy: Any, x: Any, weight: Any, rstd: Any, *_: Any) -> Callable[[], Any]:
    of_liger = _liger("rms_norm")
    _, _, rstd, *launch, mode = of_liger.rms_norm_forward(x, weight, 1e-6, 0.0, "llama", None)
    return lambda: of_liger.rms_norm_backward(dy, x, weight, rstd, 0.0, mode, *launch, False, None)


def _liger_layer_norm_bwd(dy: Any, x: Any, *rest: Any) -> Callable[[], Any] | None:
    weight, bias = rest[-3:-1]
    if weight is None or bias is None:
        return None
    of_liger = _liger("layer_norm")
    _, _, mean, rstd, *_ = of_liger.layer_norm_forward(x, weight, bias, 1e-5)
    return lambda: of_liger.layer_norm_backward(dy, x, weight, bias, mean, rstd)


def _liger_gated_product(gate: Any, up: Any, *_: Any) -> Callable[[], Any]:
    forward = _liger("swiglu").swiglu_forward
    return lambda: forward(gate, up)


def _liger_gated_product_bwd(dh: Any, gate: Any, up: Any, stock: Any, kind: str, _: Any) -> Callable[[], Any]:
    gate, up = gate.clone(), up.clone()
    backward = _liger("swiglu").swiglu_backward if kind == "silu" else _liger("geglu").geglu_backward
    return lambda: backward(gate, up, dh)


def _liger_activation_bwd(dy: Any, x: Any, kind: str, _: Any) -> Callable[[], Any] | None:
    if kind != "relu_squared" or importlib.util.find_spec("liger_kernel.ops.relu_squared") is None:
        return None
    backward = _liger("relu_squared").relu_squared_backward
    return lambda: backward(x, dy)


def _liger_loss_head(h: Any, weight: Any, bias: Any, target: Any, *_: Any) -> Callable[[], Any]:
    forward = _liger("fused_linear_cross_entropy").LigerFusedLinearCrossEntropyFunction.apply
    leaves = h.detach().requires_grad_(), weight.detach().requires_grad_()

    def run() -> Any:
        with torch.enable_grad():
            # newer versions return more than the loss
            return torch.autograd.grad(next(tensors(forward(*leaves, target))), leaves)

    return run


def milliseconds(run: Callable[[], Any]) -> float:
    """Median of many runs, each from a cold cache."""
    from triton.testing import do_bench

    return float(do_bench(run, warmup=25, rep=100, return_mode="median"))


def copy_bandwidth(device: torch.device) -> float:
    """GiB/s of a plain copy, read and written bytes counted."""
    x = torch.empty(512 * MIB, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * x.numel() / 2**30 / (milliseconds(lambda: y.copy_(x)) / 1e3)


def measure(case: Case, device: torch.device, args: argparse.Namespace, copy: float | None) -> Result:
    """Correctness, and on a GPU (`copy` is its bandwidth) the times of what is correct."""
    # triton, which reads its environment when it is imported
    from triton.errors import TritonError

    from hf_actcompress.kernels.probe import agree

    width = args.mlp if case.mlp else args.hidden
    given = arguments(case, device, getattr(torch, args.dtype), args.tokens, width)

    def call(functions: Functions) -> Any:
        return case.run(functions, given) if case.run else functions(case.name)(*given)

    ours, expected = list(tensors(call(kernels))), list(tensors(call(specification)))
    correct = len(ours) == len(expected) and all(agree(a, b, False) for a, b in zip(ours, expected, strict=True))
    result = Result(case.name, case.label, correct, moved_bytes(given, ours) / MIB)
    del ours, expected
    if not correct or copy is None:
        return result
    result.ms, result.reference_ms = milliseconds(lambda: call(kernels)), milliseconds(lambda: call(specification))
    if case.bandwidth:
        result.gib_per_second = result.moved_mib / 1024 / (result.ms / 1e3)
        result.of_copy = result.gib_per_second / copy
    try:
        peer = liger(case, given)
        result.liger_ms = milliseconds(peer) if peer else None
    except (TritonError, ImportError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        # another version of it, or a GPU that it does not know: no reason to lose our own figures
        result.note = f"Liger: {type(error).__name__}: {str(error).splitlines()[0][:80]}"
    return result


def environment(device: torch.device, args: argparse.Namespace, copy: float | None, command: str) -> dict[str, Any]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()}, interpreter"
    sizes = {"tokens": args.tokens, "hidden": args.hidden, "mlp": args.mlp, "dtype": args.dtype}
    return {"command": command, "device": where, "copy_gib_per_second": copy, **versions, **sizes}


def markdown(results: Sequence[Result], about: dict[str, Any]) -> str:
    copy = about["copy_gib_per_second"]
    speeds = f"copy {copy:.0f} GiB/s; medians from a cold cache" if copy else "no speeds: the interpreter has none"
    lines = [
        f"`{about['command']}`",
        "",
        f"{about['device']}, torch {about['torch']}, triton {about['triton']}, liger-kernel {about['liger-kernel']}; "
        f"{about['tokens']} tokens, hidden {about['hidden']}, MLP {about['mlp']}, {about['dtype']}; {speeds}.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    for r in results:
        ratios = [format(t / r.ms, ".2f") if t and r.ms else "-" for t in (r.reference_ms, r.liger_ms)]
        cells = [r.kernel, r.label, "yes" if r.correct else "NO", f"{r.moved_mib:.3g}"]
        cells += [_cell(r.ms, ".3f"), _cell(r.gib_per_second, ".0f"), _cell(r.of_copy, ".2f")]
        cells += [_cell(r.reference_ms, ".3f"), ratios[0], _cell(r.liger_ms, ".3f"), ratios[1]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{r.kernel}, {r.label}: {r.note}" for r in results if r.note), ""])


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--names", nargs="+", choices=sorted(KERNELS), default=sorted(KERNELS))
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--mlp", type=int, default=MLP)
    parser.add_argument("--quick", action="store_true", help="8 tokens, hidden 128, MLP 256")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine or this torch has no CUDA device")
    if args.quick:
        args.tokens, args.hidden, args.mlp = 8, 128, 256
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    device = torch.device(args.device)
    cases = [case for case in CASES if case.name in args.names]
    with torch.no_grad():
        copy = copy_bandwidth(device) if device.type == "cuda" else None
        results = [measure(case, device, args, copy) for case in tqdm(cases, unit="case", disable=None)]
    about = environment(
        device, args, copy, shlex.join(["python", "recipes/benchmark_kernels.py", *(argv or sys.argv[1:])])
    )
    args.out.mkdir(parents=True, exist_ok=True)
    records = (json.dumps({**asdict(result), **about}) for result in results)
    (args.out / "kernels.jsonl").write_text("\n".join(records) + "\n")
    text = markdown(results, about)
    (args.out / "kernels.md").write_text(text)
    print(text)
    return 0 if all(result.correct for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
