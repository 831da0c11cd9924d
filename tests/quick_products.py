"""Products of 16-bit matrices by way of fp32, for tests that count bytes alone.

A CPU without instructions for them (AVX2) takes 6 to 30 times as long for one in bf16 as for one in fp32. What is kept
for backward has the same size either way; values differ in their last bits, and so does the memory within a product.
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
    # with `out` it is another op for the dispatcher: one that still has torch's kernel
    found = product(*wide, **factors, out=wide[-1].new_empty((*a.shape[:-1], b.shape[-1])))
    return found.to(b.dtype)


@contextmanager
def quick_products() -> Iterator[None]:
    """Inside, a slow CPU computes 16-bit products in fp32. Other CPUs: as always."""
    if torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "AVX2"):
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # "Overriding a previously registered kernel": that is what it is for
        warnings.simplefilter("ignore")
        for name, product in PRODUCTS.items():
            library.impl(name, partial(_by_fp32, product), "CPU")
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]
