"""HOW a kept tensor is stored: pack and unpack, no autograd, no ctx.

A codec is a frozen dataclass (equal means the same format). `CODECS` is the one table: a new codec is a file here and
a row there; the contract tests iterate the rows.
"""

from __future__ import annotations

from .codec import Codec
from .float8 import Float8
from .identity import Identity
from .int_group import IntGroup

__all__ = ["CODECS", "IDENTITY", "Codec", "Float8", "Identity", "IntGroup"]

IDENTITY = Identity()

CODECS: dict[str, Codec] = {
    "identity": IDENTITY,
    "int8": IntGroup(8),
    "int4": IntGroup(4),
    "int2": IntGroup(2, group_size=32),
    "int8_stochastic": IntGroup(8, rounding="stochastic"),
    "int4_stochastic": IntGroup(4, rounding="stochastic"),
    "int2_stochastic": IntGroup(2, group_size=32, rounding="stochastic"),
    "int4_outliers": IntGroup(4, outliers=4),
    "int2_outliers": IntGroup(2, group_size=32, outliers=4),
    "fp8_e4m3": Float8("e4m3"),
    "fp8_e5m2": Float8("e5m2"),
    "fp8_e4m3_row": Float8("e4m3", group_size=None),
    "fp8_e4m3_16": Float8("e4m3", group_size=16),
}
