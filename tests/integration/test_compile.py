"""torch.compile of patched blocks and of whole patched models, without graph breaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_actcompress import patch_model
from tests.families import BODY, BY_NAME, Family, Gradients, differing, relative_error, step

three = pytest.mark.parametrize(
    "family", [BY_NAME[n] for n in ("bert", "gpt2-gelu-tanh", "llama")], ids=lambda f: f.name
)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def _block(family: Family) -> tuple[Any, dict[str, Any]]:
    """The first layer of a patched model, and what its forward takes beside x."""
    model = patch_model(family.build(), BODY)
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    if family.name != "llama":
        return layers[0], {}
    positions = torch.arange(13)[None]
    return layers[0], {"position_embeddings": model.model.rotary_emb(torch.zeros(1, 13, 32), positions)}


def _run(block: Any, x: Tensor, kwargs: dict[str, Any], parameters: list[nn.Parameter]) -> tuple[Tensor, Gradients]:
    x = x.clone().requires_grad_()
    y = block(x, **kwargs)
    y = y[0] if isinstance(y, tuple) else y
    grads = torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), [x, *parameters])
    return y.detach(), {str(i): grad for i, grad in enumerate(grads)}


@three
def test_a_patched_block(family: Family) -> None:
    block, kwargs = _block(family)
    x = torch.randn(2, 13, 32)
    parameters = list(block.parameters())
    expected, expected_grads = _run(block, x, kwargs, parameters)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    y, grads = _run(compiled, x, kwargs, parameters)
    # the same ops in the same order but for decompositions; a few roundings of fp32 in sums of 26 to 64 terms
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    assert relative_error(grads, {n: g.double() for n, g in expected_grads.items()}) < 1e-6


def _build(family: Family, dtype: torch.dtype) -> Any:
    model = family.build(dtype)
    if family.name.startswith("gpt2"):
        # without a loss type transformers logs a warning, which cannot be traced
        model.loss_type = "ForCausalLM"
    return model


@three
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_a_patched_model(family: Family, mode: str) -> None:
    dtype = torch.bfloat16 if mode == "bf16" else torch.float32
    stock, ours = (_build(family, dtype) for _ in range(2))
    patch_model(ours, BODY)
    batch = family.make_batch("right")
    expected_loss, expected = step(torch.compile(stock, fullgraph=True, backend="aot_eager"), batch)
    loss, grads = step(torch.compile(ours, fullgraph=True, backend="aot_eager"), batch)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    assert grads.keys() == expected.keys()
    eps = torch.finfo(dtype).eps
    assert relative_error(grads, {n: g.double() for n, g in expected.items()}) < 4 * eps


@three
def test_eager_after_compile(family: Family) -> None:
    """Compiling leaves the model itself as it was."""
    stock, ours = (_build(family, torch.bfloat16) for _ in range(2))
    patch_model(ours, BODY)
    batch = family.make_batch("right")
    torch.compile(ours, fullgraph=True, backend="aot_eager")(**batch)
    assert not differing(step(ours, batch)[1], step(stock, batch)[1])
