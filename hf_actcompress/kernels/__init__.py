"""Triton kernels and their launchers: tensors in, tensors out; imported lazily and never without need.

`KERNELS` maps the name of a function in `reference/` to the module here that offers the same name and signature. It is
empty until a kernel has been shown to be correct; `dispatch` then takes the reference on every device.
"""

from __future__ import annotations

KERNELS: dict[str, str] = {}
