"""What patching saves and what it costs, beside stock and gradient checkpointing: blocks of BERT, GPT-2 and Llama.

    python recipes/benchmark.py --quick
    python recipes/benchmark.py --device cuda --out results/

Each variant is built from the same weights. Every round runs each of them once, in turn, so that what else the machine
does falls on all alike; the figures are medians over the rounds, after one warm-up step each. A variant whose gradients
are off gets no speed figure, and the command fails. Writes benchmark.jsonl (one record per variant) and benchmark.md.
"""

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hf_actcompress import kept_bytes, measure_step, patch_model

VARIANTS = ("stock", "checkpointing", "exact", "exact+checkpointing")
# relative L2 error over all gradients: several roundings of the dtype, and far below what a wrong term makes
GRADIENT_LIMIT = {"float32": 1e-5, "bfloat16": 2e-2}


def bert(layers: int, hidden: int, vocab: int) -> Any:
    config = BertConfig(
        vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config)


def gpt2(layers: int, hidden: int, vocab: int) -> Any:
    config = GPT2Config(
        vocab_size=vocab, n_embd=hidden, n_layer=layers, n_head=hidden // 64, attn_pdrop=0.0, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama(layers: int, hidden: int, vocab: int) -> Any:
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256), intermediate_size=hidden * 7 // 2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


MODELS: dict[str, Callable[[int, int, int], Any]] = {"bert": bert, "gpt2": gpt2, "llama": llama}


@dataclass
class Result:
    """One variant of one model."""

    model: str
    variant: str
    gradient_error: float
    correct: bool
    kept_h: float
    peak_mib: float
    step_ms: float | None = None
    tokens_per_second: float | None = None
    step_ratio: float | None = None
    seconds: list[float] = field(default_factory=list)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--dtype", choices=tuple(GRADIENT_LIMIT), default=None, help="float32 on a CPU, else bfloat16")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2, help="an even number; kept bytes are a slope to half of it")
    parser.add_argument("--vocab", type=int, default=1024, help="the loss head's share of the step grows with it")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--dropout", type=float, default=0.1, help="of the hidden states of BERT and GPT-2")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="hidden 128, sequence 64, 3 rounds")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine or this torch has no CUDA device")
    if args.layers < 2 or args.layers % 2 or args.hidden % 64 or args.rounds < 1:
        parser.error("--layers must be even and at least 2, --hidden a multiple of 64, --rounds at least 1")
    args.dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    if args.quick:
        args.hidden, args.seq_len, args.rounds = 128, 64, 3
    return args


def prepare(name: str, variant: str, layers: int, args: argparse.Namespace) -> Any:
    """The model in train mode, with the same weights in every variant."""
    torch.manual_seed(0)
    model = MODELS[name](layers, args.hidden, args.vocab).to(args.device, getattr(torch, args.dtype)).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) and module.p > 0:
            module.p = args.dropout
    if "exact" in variant:
        patch_model(model)
    if "checkpointing" in variant:
        # transformers 5.23 renamed it
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    return model


def make_step(model: Any, ids: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    return step


def gradients(model: Any, step: Callable[[], None]) -> torch.Tensor:
    """All gradients of one step from a fixed seed, as one fp64 vector."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    step()
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def kept_slope(name: str, variant: str, args: argparse.Namespace, ids: torch.Tensor) -> float:
    """Bytes kept per token per layer in units of the hidden size."""
    kept = []
    for layers in (args.layers // 2, args.layers):
        model = prepare(name, variant, layers, args)
        kept.append(kept_bytes(lambda model=model: model(input_ids=ids, labels=ids), args.device))
    return (kept[1] - kept[0]) / (ids.numel() * args.hidden * args.layers // 2)


def timed(step: Callable[[], None], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(name: str, args: argparse.Namespace, progress: Any) -> list[Result]:
    """All variants of one model."""
    ids = torch.randint(3, args.vocab, (args.batch, args.seq_len), generator=torch.Generator().manual_seed(0))
    ids = ids.to(args.device)
    steps: dict[str, Callable[[], None]] = {}
    results: dict[str, Result] = {}
    reference = None
    for variant in VARIANTS:
        model = prepare(name, variant, args.layers, args)
        step = make_step(model, ids)
        found = gradients(model, step)
        reference = found if reference is None else reference
        error = float((found - reference).norm() / reference.norm())
        peak = measure_step(step, args.device).peak_bytes
        kept = kept_slope(name, variant, args, ids)
        # `<=` is false for a NaN
        correct = error <= GRADIENT_LIMIT[args.dtype]
        results[variant] = Result(name, variant, error, correct, kept, peak / 2**20)
        steps[variant] = step
    gc.collect()
    for step in steps.values():
        step()  # warm-up
    for _ in range(args.rounds):
        for variant, step in steps.items():
            results[variant].seconds.append(timed(step, args.device))
            progress.update()
    return finish(list(results.values()), ids.numel())


def finish(results: list[Result], tokens: int) -> list[Result]:
    """Medians, and the ratio to stock within each round; none for a variant that is not correct."""
    stock = results[0].seconds
    for result in results:
        if not result.correct:
            continue
        median = statistics.median(result.seconds)
        result.step_ms, result.tokens_per_second = 1000 * median, tokens / median
        result.step_ratio = statistics.median(a / b for a, b in zip(result.seconds, stock, strict=True))
    return results


def package_version() -> str:
    try:
        return metadata.version("hf-actcompress")
    except metadata.PackageNotFoundError:
        return "not installed, run from its source"


def environment(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "command": " ".join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_actcompress": package_version(),
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
    }


def table(results: list[Result], about: dict[str, Any]) -> str:
    """Markdown."""
    options = about["options"]
    lines = [
        f"`{about['command']}`",
        "",
        f"{about['device']}, {about['threads']} threads, torch {about['torch']}, transformers {about['transformers']}",
        f"{options['dtype']}, h = {options['hidden']}, {options['layers']} layers, vocabulary {options['vocab']}, "
        f"dropout {options['dropout']}, batch {options['batch']}, sequence {options['seq_len']}; "
        f"medians of {options['rounds']} rounds, interleaved, "
        "after one warm-up step each.",
        "",
        "| model | variant | kept, h per token, layer | peak MiB | step ms | x stock | tokens/s | gradient error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        speed = "wrong gradients | - | -"
        if r.correct:
            speed = f"{r.step_ms:.1f} | {r.step_ratio:.3f} | {r.tokens_per_second:,.0f}"
        lines.append(
            f"| {r.model} | {r.variant} | {r.kept_h:.2f} | {r.peak_mib:.1f} | {speed} | {r.gradient_error:.1e} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    about = environment(args)
    results: list[Result] = []
    with tqdm(total=len(args.models) * len(VARIANTS) * args.rounds, unit="step") as progress:
        for name in args.models:
            progress.set_description(name)
            results += measure(name, args, progress)
    args.out.mkdir(parents=True, exist_ok=True)
    records = [json.dumps({**asdict(result), **about}) for result in results]
    (args.out / "benchmark.jsonl").write_text("\n".join(records) + "\n")
    text = table(results, about)
    (args.out / "benchmark.md").write_text(text)
    print(text)
    wrong = [f"{r.model} {r.variant}: {r.gradient_error:.1e}" for r in results if not r.correct]
    if wrong:
        print(f"gradients differ from stock's beyond {GRADIENT_LIMIT[args.dtype]}: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
