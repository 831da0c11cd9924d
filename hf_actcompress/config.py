"""What to keep and how to store it: data only. `PRESETS` is the one table of names."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from .codecs import CODECS
from .errors import UnknownOptionError

CODEC_ROLES = ("linear", "norm", "mlp", "attention")


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """How each role's kept tensors are stored, and which roles are patched. The default is the preset "exact".

    Args:
        linear: Codec of linear inputs that have to be kept (most are derived and cost nothing).
        norm: Codec of the norms' inputs.
        mlp: Codec of activation inputs and of gate and up.
        attention: Codec of q, k, v where the attention op is ours.
        loss_head: Patch the language-modelling head so that nothing of vocabulary size is kept for backward.
        logits: Return ``outputs.logits`` in training as stock does. False: the head never makes them whole in
            training, and ``outputs.logits`` is absent there; ``eval()`` and ``no_grad`` are not affected.

    Raises:
        UnknownOptionError: A codec that is not in ``CODECS``.
    """

    linear: str = "identity"
    norm: str = "identity"
    mlp: str = "identity"
    attention: str = "identity"
    loss_head: bool = True
    logits: bool = True

    def __post_init__(self) -> None:
        for role in CODEC_ROLES:
            if getattr(self, role) not in CODECS:
                raise UnknownOptionError(f"codec for {role}", getattr(self, role), CODECS)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> CompressionConfig:
        """The preset of that name, with some of its fields replaced. Raises UnknownOptionError."""
        if name not in PRESETS:
            raise UnknownOptionError("preset", name, PRESETS)
        known = [field.name for field in fields(cls)]
        for option in overrides:
            if option not in known:
                raise UnknownOptionError("option", option, known)
        return replace(PRESETS[name], **overrides)

    @property
    def lossless(self) -> bool:
        """Whether every gradient stays exact."""
        return all(CODECS[getattr(self, role)].lossless for role in CODEC_ROLES)


PRESETS: dict[str, CompressionConfig] = {"exact": CompressionConfig()}


def resolve(config: CompressionConfig | str) -> CompressionConfig:
    """A config from a config or a preset's name."""
    if isinstance(config, CompressionConfig):
        return config
    if isinstance(config, str):
        return CompressionConfig.from_preset(config)
    raise UnknownOptionError("config", config, [*PRESETS, "a CompressionConfig"])
