"""The setting of a step on fake tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch

from ....config import CompressionConfig
from ....layers import Store
from ....models.probe import Answers
from ....quick.diffusion import Latents
from .cuda_rules import BLOCK
from .fake_kernels import KernelResults
from .op_results import OpResults


@dataclass(frozen=True)
class Setting:
    """How a step is run.

    Args:
        batch_size, seq_len: Sequences, and tokens per sequence.
        config: The config that the model is patched with; None: it is not patched.
        cuda: Whether to use the rules of a CUDA device; otherwise those of a CPU.
        autocast: Dtype of an autocast context around the forward, or None.
        compiled: Whether torch.compile divides the step into its graphs; the model must be one graph.
        target_len: Tokens of an encoder-decoder model's labels; None: `seq_len`.
        ranks: Number of processes over which FSDP shards the model; 1: it is not sharded.
        trl_head: Whether the loss is that of TRL's trainers.
        latents: What a sample is for a model of diffusers; None for a model of transformers.
        kernels: What each kernel makes, by the shapes of its arguments; copies made by `replace` share the object.
        ops: What each op makes; copies share it.
        answers: The answers of the probes, by what they looked at; copies share it.
        plans: The plans of layers, whatever the config; copies share it.
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
    latents: Latents | None = None
    kernels: KernelResults = field(default_factory=KernelResults, compare=False, repr=False)
    ops: OpResults = field(default_factory=OpResults, compare=False, repr=False)
    answers: Answers = field(default_factory=dict, compare=False, repr=False)
    plans: Store = field(default_factory=partial(Store, batches=True), compare=False, repr=False)

    @property
    def block(self) -> int:
        """Bytes of the allocator's smallest block."""
        return BLOCK if self.cuda else 1

    def autocast_context(self) -> torch.autocast:
        """The context in which the forward runs."""
        return torch.autocast("cpu", dtype=self.autocast or torch.bfloat16, enabled=self.autocast is not None)

    def rounded(self, nbytes: int) -> int:
        """The size of the block that the allocator gives for so many bytes."""
        return -(-nbytes // self.block) * self.block
