"""Triton kernels and their launchers: tensors in, tensors out; imported lazily and never without need.

`KERNELS` maps the name of a function in `reference/` to the module here that offers the same name and signature.

What may be a kernel. The forward value of a patched module equals stock's bit by bit, so a kernel stands in a forward
only where every step has one correctly rounded result (products, sums of two, casts); where the order of a sum or the
last bit of exp matters, the forward keeps torch's own op. What only backward sees, a gradient or a rebuilt tensor, may
differ from stock's in the last bit: it is held to stock's own error against fp64, times 1.1.
"""

from __future__ import annotations

KERNELS: dict[str, str] = {
    "int_group_pack": "int_group",
    "int_group_unpack": "int_group",
    "rms_norm_bwd": "rms_norm",
    "rms_norm_fwd": "rms_norm",
    "rms_norm_rebuild": "rms_norm",
}

# those that stand in a forward
BITWISE = frozenset({"rms_norm_fwd", "rms_norm_rebuild"})
