"""How a step on fake tensors is run."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ....config import CompressionConfig
from ....models.probe import Answers
from .cuda_rules import BLOCK
from .fake_kernels import KernelResults
from .op_results import OpResults


@dataclass(frozen=True)
class Setting:
    """How the step is run.

    Args:
        batch_size, seq_len: Of the batch.
        config: What the model is patched with; None: not at all.
        cuda: By the rules of a CUDA device, otherwise those of a CPU.
        autocast: Dtype of an autocast context around the forward, or None.
        compiled: As torch.compile divides it, where it is one graph.
        target_len: Tokens of an encoder-decoder model's labels; None: `seq_len`.
        ranks: Processes over which the model is sharded by FSDP; 1: it is not.
        trl_head: With the loss of TRL's trainers.
        kernels: What each kernel was found to make, by the shapes of its arguments; a copy by `replace` shares it.
        ops: What each op was found to make; shared likewise.
        answers: Of the probes, by what they looked at; shared likewise.
    """

    batch_size: int
    seq_len: int
    config: CompressionConfig | None
    cuda: bool
    autocast: torch.dtype | None = None
    compiled: bool = False
    target_len: int | None = None
    ranks: int = 1
    trl_head: bool = False
    kernels: KernelResults = field(default_factory=KernelResults, compare=False, repr=False)
    ops: OpResults = field(default_factory=OpResults, compare=False, repr=False)
    answers: Answers = field(default_factory=dict, compare=False, repr=False)

    @property
    def block(self) -> int:
        """The allocator's smallest block in bytes."""
        return BLOCK if self.cuda else 1

    def rounded(self, nbytes: int) -> int:
        """A size as the allocator sees it."""
        return -(-nbytes // self.block) * self.block
