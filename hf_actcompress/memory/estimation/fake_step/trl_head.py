"""The loss of TRL's trainers (SFT, DPO, KTO, GRPO, RLOO), whose fused head makes logits in tiles and keeps none.

As in TRL 1.16, `trl/kernels/chunked_logprob.py`: a tile has 4,096 tokens and 32,768 columns in the dtype of the
products. Each token has seven fp32 numbers. A backward makes fp32 gradients of all hidden states and, if the head is
trained, of its whole weight. `loss_type="chunked_nll"` is another name of the default, and `use_liger_kernel` does not
change this head. The model's own heads and losses are not called, patched or not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ....errors import ModelConfigError
from ....models.root import root_module

_TOKENS, _COLUMNS = 4096, 32768
_NUMBERS = 7


def check_trl(model: nn.Module) -> None:
    """Raise ModelConfigError if TRL has no fused head for the model."""
    root: Any = root_module(model)
    if not type(root).__name__.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) or (
        root.config.is_encoder_decoder or root.get_output_embeddings() is None
    ):
        raise ModelConfigError(f"TRL's fused head is for causal models, and {type(root).__name__} is none")


def trl_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The loss of a batch, as a scalar."""
    root: Any = root_module(model)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    hidden = root.base_model(**inputs, use_cache=False).last_hidden_state[:, :-1]
    targets = batch["labels"][:, 1:].reshape(-1)
    head = root.get_output_embeddings()
    product = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden.dtype
    log_probabilities = _Head.apply(hidden.reshape(-1, hidden.size(-1)), head.weight, head.bias, targets, product)  # type: ignore[no-untyped-call]
    loss: Tensor = -log_probabilities.sum() / targets.numel()
    return loss


class _Head(torch.autograd.Function):
    """Allocates what TRL's Function allocates, and computes nothing."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, product: torch.dtype
    ) -> Tensor:
        numbers = [_floats(hidden, len(hidden)) for _ in range(_NUMBERS)]
        _tile(hidden, weight, product)
        log_z, log_probabilities, entropy = (_floats(hidden, len(hidden)) for _ in range(3))
        del numbers
        ctx.save_for_backward(hidden, weight, bias, targets, log_z, entropy)
        ctx.product = product
        return log_probabilities

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias = ctx.saved_tensors[:3]
        given = (hidden, weight, bias)
        sums = [
            _floats(x, *x.shape) if wanted else None for x, wanted in zip(given, ctx.needs_input_grad, strict=False)
        ]
        _tile(hidden, weight, ctx.product)
        grads = [None if found is None else found.to(x.dtype) for found, x in zip(sums, given, strict=True)]
        return *grads, None, None


def _floats(like: Tensor, *sizes: int) -> Tensor:
    return like.new_empty(sizes, dtype=torch.float32)


def _tile(hidden: Tensor, weight: Tensor, product: torch.dtype) -> None:
    """Allocate a tile of logits, and the temporary tensors that it is made from if these have another dtype."""
    buffer = hidden.new_empty(min(len(hidden), _TOKENS), _COLUMNS, dtype=product)
    parts = hidden[:_TOKENS].to(product), weight[:_COLUMNS].to(product)
    del buffer, parts
