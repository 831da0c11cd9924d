"""Keys in few bits, grouped by channel, before the rotary embedding and after it: the error of the gradient.

    python recipes/keys_before_rotation.py                # seven minutes on one core
    python recipes/keys_before_rotation.py --models minilm --bits 4

HyC-LoRA (MLSys 2025) stores keys before the rotation, the preset `int4_attention` after it. The models are a pretrained
MiniLM, which has no rotation (the cosine of two texts), a Llama-like model and one of Qwen2's kind, whose keys have
biases with a deviation of 4 (language modelling; both are trained here first). Attention's forward is exact; its
backward runs again from what was stored: from rounded keys, or from rounded queries, keys and values. A channel's
tokens share a range in groups, and are rounded to nearest; ranges stay in fp32. Errors are those of the gradient of all
parameters, in fp32, without dropout. Writes keys.json and keys.md.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from common.bench_report import environment
from common.data import CausalBlocks, corpus_blocks, load_corpus
from common.files import replace_text
from common.jobs import Job, fit, minilm_folder, stack
from common.options import DEFAULT_CACHE, positive
from common.tokenization import get_tokenizer
from torch import Tensor

MODELS = ("minilm", "llama", "qwen2")
KEY_BIAS = 4.0  # deviation of the biases of Qwen2's keys before the training
STORED = "stored"  # the name of this file's attention function
COLUMNS = ("model", "bits", "rounded", "after the rotation", "before it")
Code = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """Relative errors of the gradient; `before` is None where there is no rotation."""

    model: str
    bits: int
    rounded: str
    after: float
    before: float | None


def rounded(x: Tensor, bits: int, tokens: int) -> Tensor:
    """x [..., S, D] as it comes back from codes of so many bits; groups of `tokens` rows of a channel share a range."""
    parts = []
    for part in x.split(tokens, -2):
        low, high = part.aminmax(dim=-2, keepdim=True)
        step = ((high - low) / (2**bits - 1)).clamp_min(1e-30)
        parts.append(((part - low) / step).round() * step + low)
    return torch.cat(parts, -2)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, H, S, D] rotated by the angles [B, S, D]; with -sin it is turned back."""
    a, b = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat((-b, a), -1) * sin.unsqueeze(1)


class Stored(torch.autograd.Function):
    """Attention whose backward runs it again from what the `codes` leave of q, k and v."""

    @staticmethod
    def forward(ctx: Any, attend: Callable[..., Tensor], codes: Sequence[Code], *qkv: Tensor) -> Tensor:
        ctx.attend, ctx.codes = attend, codes
        ctx.save_for_backward(*qkv)
        return attend(*qkv)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        kept = [code(x).requires_grad_() for code, x in zip(ctx.codes, ctx.saved_tensors, strict=True)]
        with torch.enable_grad():
            y = ctx.attend(*kept)
        return None, None, *torch.autograd.grad(y, kept, dy)


class Experiment:
    """A model, its loss, and how attention stores q, k and v."""

    def __init__(self, model: Any, loss: Callable[[Any], Tensor]) -> None:
        self.model, self.loss = model.train(), loss
        self.codes: Sequence[Code] = [lambda x: x] * 3
        self.angles: tuple[Tensor, Tensor] | None = None
        for module in model.modules():
            if type(module).__name__.endswith("RotaryEmbedding"):
                module.register_forward_hook(lambda _, args, angles: setattr(self, "angles", angles))
        sdpa = hf.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]

        def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
            return Stored.apply(lambda *qkv: sdpa(module, *qkv, mask, **options)[0], self.codes, q, k, v), None

        hf.AttentionInterface.register(STORED, attention)
        hf.AttentionMaskInterface.register(STORED, hf.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
        model.set_attn_implementation(STORED)
        self.exact = self.gradient([lambda x: x] * 3)

    def gradient(self, codes: Sequence[Code]) -> Tensor:
        self.codes = codes
        self.model.zero_grad()
        self.loss(self.model).backward()
        return torch.cat([p.grad.flatten().double() for p in self.model.parameters() if p.grad is not None])

    def error(self, bits: int, tokens: int, keys_alone: bool, before: bool) -> float:
        """The error with rounded keys, or with rounded queries, keys and values; keys are rounded before or after
        rotation.
        """

        def after(x: Tensor) -> Tensor:
            return rounded(x, bits, tokens)

        def turned_back(k: Tensor) -> Tensor:
            assert self.angles is not None
            cos, sin = self.angles
            return turned(after(turned(k, cos, -sin)), cos, sin)

        other: Code = (lambda x: x) if keys_alone else after
        found = self.gradient((other, turned_back if before else after, other))
        return float((found - self.exact).norm() / self.exact.norm())


def minilm(args: argparse.Namespace) -> Experiment:
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = hf.AutoModel.from_pretrained(minilm_folder(), **off)
    tokenizer = hf.AutoTokenizer.from_pretrained(minilm_folder())
    options = argparse.Namespace(dataset=None, text_files=None, max_documents=None)
    texts = [text for text in load_corpus(options).held_out if len(text) > 8 * args.length][:2]
    ids = tokenizer(texts, truncation=True, max_length=args.length, return_tensors="pt")["input_ids"]

    def loss(model: Any) -> Tensor:
        a, b = model(input_ids=ids).last_hidden_state.mean(1)
        return torch.nn.functional.cosine_similarity(a, b, dim=0)

    return Experiment(model, loss)


def trained(name: str, args: argparse.Namespace) -> Experiment:
    """A small language model after some steps on the standard library's source, and a held-out batch."""
    options = argparse.Namespace(
        dataset=None, text_files=None, max_documents=None, model=None, cache_dir=DEFAULT_CACHE, vocab_size=2048,
        seq_len=args.length,
    )  # fmt: skip
    corpus = load_corpus(options)
    tokenizer = get_tokenizer(options, corpus, "causal")
    train, held_out = map(CausalBlocks, corpus_blocks(options, corpus, tokenizer))
    kind = {"llama": hf.LlamaConfig, "qwen2": hf.Qwen2Config}[name]
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(kind(
        vocab_size=len(tokenizer), hidden_size=args.hidden, intermediate_size=7 * args.hidden // 2,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, use_cache=False,
    ))  # fmt: skip
    if name == "qwen2":
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.k_proj.bias, std=KEY_BIAS)
    fit(Job(name, model, 2e-3, list(train), [], 4), 0, args.steps)
    batch = stack([held_out[i] for i in range(2)])
    return Experiment(model, lambda model: model(**batch).loss)


def measure(name: str, args: argparse.Namespace) -> list[Row]:
    experiment = minilm(args) if name == "minilm" else trained(name, args)
    rows = []
    for what in ("keys", "queries, keys and values"):
        for bits in args.bits:
            options = bits, args.group, what == "keys"
            after = experiment.error(*options, before=False)
            before = experiment.error(*options, before=True) if experiment.angles is not None else None
            rows.append(Row(name, bits, what, after, before))
            print(rows[-1])
    return rows


def markdown(rows: Sequence[Row], about: dict[str, Any]) -> str:
    lines = [f"`{about['command']}`", "", f"{about['device']}, torch {about['torch']}, "]
    lines[-1] += f"transformers {about['transformers']}"
    lines += ["", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for row in rows:
        before = "no rotation" if row.before is None else f"{row.before:.2%}"
        lines.append(f"| {row.model} | {row.bits} | {row.rounded} | {row.after:.2%} | {before} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the models one after the other and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--bits", nargs="+", type=int, default=[3, 4, 5, 6, 8])
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--group", type=int, default=64, help="tokens of a channel that share a range")
    parser.add_argument("--hidden", type=int, default=256, help="of the models that are trained here")
    parser.add_argument("--steps", type=positive(int), default=150, help="of their training")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/keys_before_rotation"))
    args = parser.parse_args(argv)
    command = shlex.join(["python", "recipes/keys_before_rotation.py", *(sys.argv[1:] if argv is None else argv)])
    about = environment("cpu", command, vars(args))
    rows = [row for name in args.models for row in measure(name, args)]
    record = {**about, "rows": [asdict(row) for row in rows]}
    replace_text(args.output_dir / "keys.json", json.dumps(record, indent=2) + "\n")
    replace_text(args.output_dir / "keys.md", markdown(rows, about))
    print(markdown(rows, about))
    return 0


if __name__ == "__main__":
    sys.exit(main())
