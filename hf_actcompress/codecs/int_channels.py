"""Integers in groups along the tokens: every channel has ranges of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .codec import Codec, TensorMeta, meta_of
from .int_group import IntGroup


@dataclass(frozen=True)
class IntChannels(Codec):
    """Group quantisation, rounded to nearest, in which neighbouring tokens of one channel share a range.

    For queries and keys: their channels differ more than their tokens. What all keys have in common, such as the bias
    of their projection, is in the zero points and costs no code.

    Bytes: ``bits / 8 + 4 / group_size`` per element; a group of fewer tokens takes its 4 bytes per channel, too.
    Error: that of `IntGroup` with the same bits, in other groups.
    Bias: up to half a step.
    Source: HyC-LoRA (MLSys 2025) quantises keys by channel, with one range for all tokens, which is calibrated in the
        first steps and then fixed. Here each group of tokens has the range of the tensor's own values: on MiniLM at 256
        tokens, 4-bit queries, keys and values in groups of 64 give a gradient error of 9.4%, in one group of 256 tokens
        13.6%. HyC-LoRA takes keys before the rotation, this codec after it; see recipes/results/README.md for why.

    Args:
        bits: As for `IntGroup`.
        group_size: Tokens that share a scale and a zero point; the last group may be shorter.

    Raises:
        UnknownOptionError: Another number of bits.
        ValueError: A group size below 1.
    """

    takes_rows = True
    along_tokens = True
    bits: int = 5
    group_size: int = 64

    def __post_init__(self) -> None:
        self._groups()

    def _groups(self) -> IntGroup:
        return IntGroup(self.bits, self.group_size)

    def pack(self, x: Tensor) -> tuple[tuple[Tensor, ...], object]:
        meta = TensorMeta.of(x)
        tensors, _ = self._groups().pack(_channels_first(x))
        return tensors, meta

    def unpack(self, tensors: tuple[Tensor, ...], meta: object) -> Tensor:
        known = meta_of(meta)
        channels = self._groups().unpack(tensors, TensorMeta(_swapped(known.shape), known.dtype))
        return _channels_first(channels).contiguous()

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return self._groups().nbytes(_swapped(shape), dtype)


def _channels_first(x: Tensor) -> Tensor:
    """[..., D, S] of [..., S, D]; a tensor without tokens is returned as it is."""
    return x.transpose(-1, -2) if x.dim() > 1 else x


def _swapped(shape: torch.Size) -> torch.Size:
    return torch.Size((*shape[:-2], shape[-1], shape[-2])) if len(shape) > 1 else shape
