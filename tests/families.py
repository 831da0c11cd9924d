"""The table of model families for the tests: tiny models that are built from configs, so nothing is downloaded."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_actcompress import CompressionConfig

VOCAB = 67
Batch = dict[str, Any]
Gradients = dict[str, Tensor]

_BERT = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
_LLAMA = {**_BERT, "num_key_value_heads": 2, "intermediate_size": 56, "use_cache": False, "pad_token_id": 0}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "use_cache": False}
_T5 = {
    "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "use_cache": False,
    "decoder_start_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One row.

    Attributes:
        config: Name of the config class, and its options.
        model: Name of the model class.
        dropout: Config fields that are dropout probabilities (hidden and attention).
        task: What the batch looks like: "causal", "masked", "seq2seq" or "image".
        bit_equal: Modes in which every gradient equals stock's bit by bit. In other modes, the tests compare with the
            fp64 oracle. There, sums are taken in another order (an RMSNorm in fp32 returns one gradient, where the
            stock graph adds two to the residual's; T5's bias), or activations that stock computes in five ops are
            rounded once.
        paddings: The values of `padding` that `make_batch` accepts for this family.
    """

    name: str
    config: str
    options: dict[str, Any]
    model: str
    dropout: tuple[str, ...]
    task: str = "causal"
    bit_equal: tuple[str, ...] = ("fp32", "bf16", "autocast")
    paddings: tuple[str, ...] = ("none", "right", "left")
    sizes: dict[str, int] = field(default_factory=lambda: {"batch": 3, "length": 13})

    def make_config(self, *, dropout: float = 0.0, **options: Any) -> Any:
        """The tiny config; `dropout` goes to every dropout field."""
        probabilities = dict.fromkeys(self.dropout, dropout)
        return getattr(hf, self.config)(**{**self.options, **probabilities, **options})

    def build(self, dtype: torch.dtype = torch.float32, *, dropout: float = 0.0, seed: int = 0, **options: Any) -> Any:
        """The model in train mode, always with the same weights for the same seed."""
        torch.manual_seed(seed)
        model = getattr(hf, self.model)(self.make_config(dropout=dropout, **options))
        # with biases of 0 and norm weights of 1, an op that ignores them would still give the right result
        for name, p in model.named_parameters():
            if p.dim() == 1:
                nn.init.normal_(p, mean=0.0 if name.endswith("bias") else 1.0, std=0.1)
        return model.to(dtype).train()

    def make_batch(self, padding: str = "none", seed: int = 0) -> Batch:
        """A batch with labels; `padding` is "none", "right" or "left"."""
        generator = torch.Generator().manual_seed(seed)
        b, s = self.sizes["batch"], self.sizes["length"]
        if self.task == "image":
            pixels = torch.randn(b, 3, 16, 16, generator=generator)
            return {"pixel_values": pixels, "labels": torch.randint(0, 2, (b,), generator=generator)}
        ids = torch.randint(3, VOCAB, (b, s), generator=generator)
        batch: Batch = {"input_ids": ids, "attention_mask": _mask(b, s, padding)}
        batch["labels"] = ids.masked_fill(batch["attention_mask"] == 0, -100)
        if self.task == "masked":
            batch["labels"] = batch["labels"].masked_fill(torch.rand(b, s, generator=generator) < 0.4, -100)
        if self.task == "seq2seq":
            batch["labels"] = torch.randint(3, VOCAB, (b, 7), generator=generator)
        if padding == "none":
            del batch["attention_mask"]
        return batch


def _mask(b: int, s: int, padding: str) -> Tensor:
    mask = torch.ones(b, s, dtype=torch.long)
    for row in range(1, b):  # row 0 is full, the others lose 4, 8, ... tokens
        gone = 4 * row
        mask[row, slice(s - gone, s) if padding == "right" else slice(0, gone)] = 0
    return mask if padding != "none" else torch.ones_like(mask)


_ATTENTION = ("attention_dropout",)
_BERT_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_GPT2_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")

FAMILIES: tuple[Family, ...] = (
    Family("bert", "BertConfig", _BERT, "BertForMaskedLM", _BERT_DROPOUT, "masked"),
    Family("roberta", "RobertaConfig", {**_BERT, "pad_token_id": 1}, "RobertaForMaskedLM", _BERT_DROPOUT, "masked"),
    Family(
        "distilbert", "DistilBertConfig",
        {"vocab_size": VOCAB, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 64},
        "DistilBertForMaskedLM", ("dropout", "attention_dropout"), "masked",
    ),
    Family(
        "modernbert", "ModernBertConfig",
        {**_BERT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
         "local_attention": 8},
        "ModernBertForMaskedLM", ("embedding_dropout", "mlp_dropout", "attention_dropout"), "masked",
    ),
    Family("gpt2-gelu-new", "GPT2Config", _GPT2, "GPT2LMHeadModel", _GPT2_DROPOUT, bit_equal=()),
    Family(
        "gpt2-gelu-tanh", "GPT2Config", {**_GPT2, "activation_function": "gelu_pytorch_tanh"}, "GPT2LMHeadModel",
        _GPT2_DROPOUT,
    ),
    Family(
        "opt", "OPTConfig",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64,
         "word_embed_proj_dim": 32, "max_position_embeddings": 64, "use_cache": False},
        "OPTForCausalLM", ("dropout", "attention_dropout"),
    ),
    Family("llama", "LlamaConfig", _LLAMA, "LlamaForCausalLM", _ATTENTION, bit_equal=("bf16",)),
    Family(
        "mistral", "MistralConfig", {**_LLAMA, "sliding_window": 6}, "MistralForCausalLM", _ATTENTION,
        bit_equal=("bf16",),
    ),
    Family("qwen2", "Qwen2Config", _LLAMA, "Qwen2ForCausalLM", _ATTENTION, bit_equal=("bf16",)),
    Family("qwen3", "Qwen3Config", {**_LLAMA, "head_dim": 8}, "Qwen3ForCausalLM", _ATTENTION, bit_equal=("bf16",)),
    Family("gemma", "GemmaConfig", {**_LLAMA, "head_dim": 8}, "GemmaForCausalLM", _ATTENTION, bit_equal=("bf16",)),
    Family(
        "phi3", "Phi3Config", {**_LLAMA, "bos_token_id": 1, "eos_token_id": 2}, "Phi3ForCausalLM",
        ("resid_pdrop", "embd_pdrop", "attention_dropout"), bit_equal=("bf16",),
    ),
    Family("t5", "T5Config", _T5, "T5ForConditionalGeneration", ("dropout_rate",), "seq2seq", bit_equal=()),
    Family(
        "t5-gated", "T5Config", {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        "T5ForConditionalGeneration", ("dropout_rate",), "seq2seq", bit_equal=(),
    ),
    Family(
        "vit", "ViTConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
         "image_size": 16, "patch_size": 4},
        "ViTForImageClassification", _BERT_DROPOUT, "image", paddings=("none",),
    ),
)  # fmt: skip

# everything except the loss head: its gradients have a smaller error than stock's, so they are not bit-equal
BODY = CompressionConfig(loss_head=False)
MODES = ("fp32", "bf16", "autocast")
BY_NAME = {family.name: family for family in FAMILIES}


def build(family: Family, mode: str, **options: Any) -> Any:
    """A model for a mode: its weights are bf16 in mode "bf16", and fp32 in the modes "fp32" and "autocast"."""
    return family.build(torch.bfloat16 if mode == "bf16" else torch.float32, **options)


def cast_batch(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with its floating-point tensors in `dtype`."""
    return {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}


@contextmanager
def mode_of(mode: str) -> Iterator[None]:
    """The autocast state of a mode."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "autocast"):
        yield


def step(model: Any, batch: Batch, mode: str = "fp32", seed: int = 7) -> tuple[Tensor, Gradients]:
    """Run one forward and backward from a fixed seed. Returns the loss and the gradients, and clears `.grad`."""
    torch.manual_seed(seed)
    # the inputs have the dtype of the weights, which is fp32 under autocast
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    with mode_of(mode):
        loss = model(**cast_batch(batch, dtype)).loss
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.detach(), grads


class Fp64(TorchFunctionMode):
    """Turns the casts to fp32 that models make (norms, softmax, loss) into casts to fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.float:
            return args[0].double()
        wide = {torch.float32: torch.float64}
        args = tuple(wide.get(x, x) if isinstance(x, torch.dtype) else x for x in args)
        kwargs = {k: wide.get(x, x) if isinstance(x, torch.dtype) else x for k, x in kwargs.items()}
        return func(*args, **kwargs)


def oracle_step(model: Any, batch: Batch) -> Gradients:
    """The gradients of a copy of the stock model that computes everything in fp64."""
    with Fp64():
        return step(copy.deepcopy(model).double(), batch)[1]


def differing(a: Gradients, b: Gradients) -> list[str]:
    """Names of the parameters whose gradients are not bit-equal, or that only one side has."""
    return sorted(n for n in a.keys() | b.keys() if n not in a or n not in b or not torch.equal(a[n], b[n]))


def relative_error(grads: Gradients, oracle: Gradients) -> float:
    """The L2 norm of the errors of all gradients, divided by the L2 norm of the oracle's gradients; in fp64."""
    error = sum(float((grads[n].double() - oracle[n]).square().sum()) for n in oracle)
    size = sum(float(oracle[n].square().sum()) for n in oracle)
    return (error / size) ** 0.5
