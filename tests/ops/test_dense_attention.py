"""Direct calls of fused kernels: torch's own results on a CPU, torch's own calls for CUDA tensors without data."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from hf_actcompress.codecs.table import CODECS
from hf_actcompress.ops import fused_attention
from hf_actcompress.private_apis import FakeTensorMode
from hf_actcompress.reference.attention import repeat_heads
from hf_actcompress.reference.dense_attention import (
    dense_attention_bwd,
    dense_attention_fwd,
    fused_kernel,
    sdpa_settings,
    shared_bias,
)

B, T, D = 2, 21, 16


def heads(count: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    return torch.randn(B, T, count, D, dtype=dtype, device=device).transpose(1, 2)


def a_mask(dtype: torch.dtype | None) -> Tensor | None:
    if dtype is None:
        return None
    allowed = torch.ones(B, 1, T, T, dtype=torch.bool).tril()
    return allowed if dtype == torch.bool else torch.zeros(B, 1, T, T, dtype=dtype).masked_fill(~allowed, -1e4)


@pytest.mark.parametrize("of_q, of_kv", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [None, torch.bool, "additive"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_cpu(of_q: int, of_kv: int, dtype: torch.dtype, kind: Any, scale: float | None) -> None:
    torch.manual_seed(0)
    mask = a_mask(dtype if kind == "additive" else kind)
    q, k, v = (heads(count, dtype).requires_grad_() for count in (of_q, of_kv, of_kv))
    dout = torch.randn(B, T, of_q, D, dtype=dtype).transpose(1, 2)
    if mask is None:
        expected = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=of_q != of_kv)
    else:
        # as transformers calls it
        wide = (repeat_heads(x, of_q // of_kv) for x in (k, v))
        expected = scaled_dot_product_attention(q, *wide, attn_mask=mask, scale=scale)
    wanted = torch.autograd.grad(expected, (q, k, v), dout)
    shape = None if mask is None else (mask.shape, mask.dtype)
    kernel = fused_kernel(
        q.device, dtype, (B, T), (of_q, of_kv, D, D), shape, 0.0, mask is None, sdpa_settings()
    )  # fmt: skip
    assert kernel == "cpu"
    with torch.no_grad():
        out, lse, *drawn = dense_attention_fwd(kernel, q, k, v, mask, 0.0, mask is None, scale)
        options = 0.0, mask is None, scale
        found = dense_attention_bwd(kernel, dout, q, k, v, out, lse, mask, *drawn, *options)
    assert torch.equal(out, expected) and all(map(torch.equal, found, wanted))
    # kept through a codec that loses nothing, the op has stock's bits, too
    kept = fused_attention(q, k, v, mask, mask is None, scale, codec=CODECS["offload"])
    assert torch.equal(kept, expected) and all(map(torch.equal, torch.autograd.grad(kept, (q, k, v), dout), wanted))


def kernel_of(**options: Any) -> str | None:
    given = {
        "device": torch.device("cpu"), "dtype": torch.float32, "rows": (B, T), "heads": (2, 2, D, D), "mask": None,
        "dropout": 0.0, "causal": True, "settings": sdpa_settings(), **options,
    }  # fmt: skip
    return fused_kernel(**given)


def test_calls_that_torch_runs_otherwise() -> None:
    assert kernel_of() == "cpu"
    assert kernel_of(dropout=0.1) is None
    assert kernel_of(rows=(B, 1)) is None
    assert kernel_of(heads=(2, 2, D, 2 * D)) is None
    assert kernel_of(dtype=torch.float16, mask=(torch.Size((B, 1, T, T + 3)), torch.bool)) is None
    assert kernel_of(device=torch.device("meta")) is None
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert kernel_of(settings=sdpa_settings()) is None


class Names(TorchDispatchMode):
    """The names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kernel, of_kv, masked", [("flash", 2, False), ("efficient", 4, True), ("efficient", 2, True)])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_cuda_kernels_without_data(kernel: str, of_kv: int, masked: bool, dropout: float) -> None:
    """One kernel runs in forward and one in backward, with the right shapes. Only a GPU can show what they compute."""
    with FakeTensorMode(), Names() as ops:
        q, k, v = (heads(count, torch.bfloat16, "cuda") for count in (4, of_kv, of_kv))
        mask = torch.ones(B, 1, T, T, dtype=torch.bool, device="cuda") if masked else None
        options = dropout, not masked, None
        out, lse, *drawn = dense_attention_fwd(kernel, q, k, v, mask, *options)
        grads = dense_attention_bwd(kernel, torch.empty_like(out), q, k, v, out, lse, mask, *drawn, *options)
    assert [name for name in ops.names if "scaled_dot_product" in name] == [
        f"_scaled_dot_product_{kernel}_attention", f"_scaled_dot_product_{kernel}_attention_backward"
    ]  # fmt: skip
    assert out.shape == q.shape and lse.shape[:2] == (B, 4) and all(x is not None for x in drawn)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("tokens", [T, 32])
def test_a_mask_is_made_additive_once_for_all_layers(tokens: int) -> None:
    """Counts the ops for CUDA tensors without data. Two layers, forward and backward, convert the mask once."""
    with FakeTensorMode(), Names() as ops:
        q, k, v = (torch.empty(B, 4, tokens, D, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        mask = torch.ones(B, 1, tokens, tokens, dtype=torch.bool, device="cuda")
        for _ in range(2):
            bias = shared_bias(mask, q.dtype)
            out, lse, *drawn = dense_attention_fwd("efficient", q, k, v, bias, 0.0, False, None)
            dense_attention_bwd("efficient", out, q, k, v, out, lse, bias, *drawn, 0.0, False, None)
    assert bias.dtype == torch.bfloat16 and bias.stride(-2) % 16 == 0
    assert ops.names.count("masked_fill_") == 1 and ops.names.count("constant_pad_nd") == (tokens % 16 > 0)


def test_a_mask_that_was_written_on_is_made_additive_again_and_none_is_held() -> None:
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    bias = shared_bias(mask, torch.float32)
    assert shared_bias(mask, torch.float32) is bias and shared_bias(mask, torch.bfloat16) is not bias
    mask[..., 0] = False
    again = shared_bias(mask, torch.float32)
    assert torch.equal(again, torch.zeros(4, 4).index_fill(1, torch.tensor(0), float("-inf")).expand(1, 1, 4, 4))
    held = weakref.ref(again)
    del mask, again, bias
    gc.collect()
    assert held() is None
