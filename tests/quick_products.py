"""Compute products of 16-bit matrices in fp32, for tests that only count kept bytes.

A CPU that has only AVX2 has no instructions for 16-bit products: one in bf16 takes 6 to 30 times as long as one in
fp32. The tensors kept for backward have the same sizes in both cases. The values differ in their last bits, and the
temporary memory inside a product differs too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

PRODUCTS: dict[str, Callable[..., Tensor]] = {"mm": torch.mm, "bmm": torch.bmm, "addmm": torch.addmm}


def _by_fp32(product: Callable[..., Tensor], *matrices: Tensor, **factors: Any) -> Tensor:
    a, b = matrices[-2:]
    wide = [x.float() if x.dtype in (torch.bfloat16, torch.float16) else x for x in matrices]
    # with `out`, torch dispatches another op, whose kernel was not replaced: so this call does not recurse
    found = product(*wide, **factors, out=wide[-1].new_empty((*a.shape[:-1], b.shape[-1])))
    return found.to(b.dtype)


@contextmanager
def quick_products() -> Iterator[None]:
    """While the block runs, a CPU without instructions for 16-bit products computes them in fp32."""
    if torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "AVX2"):
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # torch warns "Overriding a previously registered kernel", which is intended here
        warnings.simplefilter("ignore")
        for name, product in PRODUCTS.items():
            library.impl(name, partial(_by_fp32, product), "CPU")
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]
