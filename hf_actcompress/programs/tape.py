"""What a layer computes, in order: the tape that `recorder` writes and programs are made of."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..codecs import IDENTITY, Codec
from .own_attention import AttentionCode
from .step import Step


@dataclass(frozen=True)
class Attend:
    """A call of the attention function that the model's config names.

    Attributes:
        module: The name of the attention module in the layer.
        ins: q, k and v, [B, H, T, D].
        out: The output, [B, T, H, D].
        keywords: The keywords of the call, without the mask.
        codec: The codec through which q, k, v and the output are kept.
        causal: Whether the upper triangle is masked where there is no mask.
        normed: Whether q or k comes from a norm, so that it can be made again from what the norm keeps.
        own: The code that runs, and runs again in backward, in place of the function that the config names; None: that
            function runs.
        bias: The value of the position bias that `own` takes.
        mask: The name of the layer's argument that is its mask.
        handed: For a function that we have no code for: pairs of a keyword of the call and the layer's argument that
            is handed on in it. None for torch's attention and for `own`.
    """

    module: str
    ins: tuple[int, int, int]
    out: int
    keywords: tuple[tuple[str, Any], ...]
    codec: Codec = IDENTITY
    causal: bool = True
    normed: bool = False
    own: AttentionCode | None = field(default=None, compare=False)
    bias: int | None = None
    mask: str = "attention_mask"
    handed: tuple[tuple[str, str], ...] | None = None

    def key(self, sizes: bool = True) -> Hashable:
        """Attentions of the same key do the same."""
        return self, None if self.own is None else self.own.key(sizes)


@dataclass(frozen=True)
class Given:
    """Stands for the layer's argument of that name in the tuple that the layer returns."""

    name: str


@dataclass
class Tape:
    """All that a layer computes.

    Attributes:
        inputs: The name of each given tensor -> its value: "x", "cos", "sin", and others by the name of the argument.
        parameters: The dotted name of each parameter that is read -> its value.
        entries: Steps and attentions in the order in which they run.
        result: The value that the layer returns.
        returns: What else is in the tuple that it returns; None if it returns a tensor.
        metas: For each value a tensor without data, which has its shape.
        whole: Whether the layer may run as one program, its attention included.
        again: Whether that program may be made again in backward, where the layer is checkpointed.
    """

    inputs: dict[str, int]
    parameters: dict[str, int]
    entries: list[Step | Attend]
    result: int
    returns: tuple[Any, ...] | None
    metas: list[Tensor]
    whole: bool = True
    again: bool = True

    def key(self, sizes: bool = True) -> Hashable:
        """Layers of the same key do the same with their tensors; without sizes, perhaps with tensors of other sizes."""
        entries = tuple(entry.key(sizes) for entry in self.entries)
        metas = tuple((tuple(meta.shape) if sizes else (), meta.dtype) for meta in self.metas)
        return tuple(self.inputs.items()), tuple(self.parameters.items()), entries, self.result, self.returns, metas

    @property
    def lossless(self) -> bool:
        """Whether nothing is kept through a codec."""
        return all(entry.codec == IDENTITY for entry in self.entries)

    @property
    def calls_another(self) -> bool:
        """Whether an attention function is called that we have no code for."""
        return any(isinstance(entry, Attend) and entry.handed is not None for entry in self.entries)

    def draws(self) -> bool:
        """Whether something in it draws random numbers."""
        return any(
            bool(dict(entry.keywords).get("dropout")) if isinstance(entry, Attend) else entry.operation.draws
            for entry in self.entries
        )


def plain(module: nn.Module) -> Hashable:
    """What identifies an activation module without parameters: its type and its plain attributes."""
    own = {name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float, str))}
    return type(module), tuple(sorted(own.items()))
