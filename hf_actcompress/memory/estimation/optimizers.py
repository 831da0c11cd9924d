"""Bytes of an optimizer's states, by a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

from torch import Tensor, nn

from ...errors import UnknownOptionError
from ...records import storage_sizes
from .fake_step.setting import Setting

# of bitsandbytes' blockwise 8-bit states: one fp32 scale per block, and small tensors in fp32
_BLOCK, _SMALLEST = 256, 4096


@dataclass(frozen=True)
class OptimizerRule:
    """What an optimizer keeps of one trainable parameter from its first step on.

    Args:
        states: The sizes in bytes of its states for a parameter.
        what: In words.
    """

    states: Callable[[Tensor], Iterable[int]]
    what: str


def _copies(count: int) -> Callable[[Tensor], Iterable[int]]:
    return lambda p: [p.nbytes] * count


def _fused_adamw(p: Tensor) -> Iterable[int]:
    # and a step count in fp32
    return [p.nbytes, p.nbytes, 4]


def _adamw_8bit(p: Tensor) -> Iterable[int]:
    n = p.numel()
    if n < _SMALLEST:
        return [4 * n, 4 * n]
    return [n, n, 4 * -(-n // _BLOCK), 4 * -(-n // _BLOCK)]


def _adafactor(p: Tensor) -> Iterable[int]:
    if p.dim() < 2:
        return [4 * p.numel(), 4]
    # and a root mean square
    return [4 * (p.numel() // max(1, p.size(-1))), 4 * (p.numel() // max(1, p.size(-2))), 4]


OPTIMIZERS: dict[str, OptimizerRule] = {
    "adamw": OptimizerRule(_fused_adamw, "two moments in the parameter's dtype, as torch's fused AdamW keeps them"),
    "adamw_8bit": OptimizerRule(_adamw_8bit, "two moments in 8 bits, as bitsandbytes keeps them"),
    "adafactor": OptimizerRule(
        _adafactor, "row and column sums in fp32 and no momentum, as transformers' Adafactor keeps them"
    ),
    "sgd_momentum": OptimizerRule(_copies(1), "one moment in the parameter's dtype"),
    "sgd": OptimizerRule(_copies(0), "nothing"),
}


# names of transformers' `TrainingArguments(optim=...)`; a paged one keeps the same, but may move it to the host
_OF_TRAINER = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw_apex_fused": "adamw",
    "paged_adamw_32bit": "adamw", "paged_adamw": "adamw",
    "adamw_bnb_8bit": "adamw_8bit", "paged_adamw_8bit": "adamw_8bit",
}  # fmt: skip


def optimizer_rule(name: str) -> OptimizerRule:
    """The row of that name, or of one that transformers' Trainer knows it by. Raises UnknownOptionError."""
    row = _OF_TRAINER.get(name, name)
    if row not in OPTIMIZERS:
        raise UnknownOptionError("optimizer", name, [*OPTIMIZERS, *_OF_TRAINER])
    return OPTIMIZERS[row]


def state_bytes(whole: nn.Module, setting: Setting, rule: OptimizerRule) -> tuple[int, int, int]:
    """Bytes of weights and buffers, gradients and optimizer states."""
    trained = [p for p in whole.parameters() if p.requires_grad]
    return (
        sum(map(setting.rounded, storage_sizes(chain(whole.parameters(), whole.buffers())).values())),
        sum(setting.rounded(p.nbytes) for p in trained),
        sum(setting.rounded(size) for p in trained for size in rule.states(p)),
    )
