"""HOW a kept tensor is stored: pack and unpack, no autograd, no ctx.

A codec is a frozen dataclass (equal means the same format). `CODECS` in `table.py` is the one table, which also has the
codecs of `methods/`.
"""

from __future__ import annotations

from .codec import Codec, TensorMeta
from .float8 import Float8
from .identity import Identity
from .int_channels import IntChannels
from .int_fine import IntFine
from .int_group import IntGroup
from .offload import Offload

__all__ = [
    "IDENTITY",
    "Codec",
    "Float8",
    "Identity",
    "IntChannels",
    "IntFine",
    "IntGroup",
    "Offload",
    "TensorMeta",
    "packs_alike",
]

IDENTITY = Identity()


def packs_alike(codec: Codec) -> bool:
    """Whether a codec packs an activation to the same bits, whichever op calls it: it neither draws nor learns."""
    return codec == IDENTITY or (type(codec) is IntGroup and codec.rounding == "nearest") or type(codec) is Float8
