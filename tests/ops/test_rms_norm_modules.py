"""Patched RMSNorms of transformers and torch: values are bit-equal, gradients are within the law."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from hf_actcompress.config import CompressionConfig
from hf_actcompress.models.rules import find_site
from hf_actcompress.models.sites import Declined, Site
from hf_actcompress.modules.base import patch_instance
from hf_actcompress.records import Derived, frame, known_record
from hf_actcompress.reference import tiles
from tests.oracle import assert_equal_bits, assert_within_law, gradients, kept_bytes, nbytes

WIDTH = 24
NORMS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaRMSNorm(WIDTH),
    "gemma": lambda: GemmaRMSNorm(WIDTH),
    "olmo2": lambda: Olmo2RMSNorm(WIDTH),
    "t5": lambda: T5LayerNorm(WIDTH),
    "qwen3": lambda: Qwen3RMSNorm(WIDTH),
    "torch": lambda: nn.RMSNorm(WIDTH, eps=1e-6),
    "torch default eps": lambda: nn.RMSNorm(WIDTH),
}
# transformers' norms are compositions whose backward ours repeats; torch's norm has a backward of its own
COMPOSED = ("llama", "gemma", "olmo2", "t5", "qwen3")
# a tile of 2 rows
TILE = 2 * WIDTH
SHAPES = {"hidden": (2, 5, WIDTH), "heads": (2, 3, 5, WIDTH), "row": (WIDTH,)}


def pair(name: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    stock = NORMS[name]()
    with torch.no_grad():
        stock.weight.add_(0.3 * torch.randn(WIDTH))
    stock.to(dtype)
    ours = copy.deepcopy(stock)
    site = find_site(ours, CompressionConfig())
    assert isinstance(site, Site), site
    patch_instance(ours, site.mixin, site.settings)
    return ours, stock


def with_weight(module: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """The module as a function of its input and its weight."""
    return lambda x, weight: torch.func.functional_call(module, {"weight": weight}, (x,))


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_are_stock_and_gradients_within_law(name, shape, dtype):
    ours, stock = pair(name, dtype)
    eps = getattr(stock, "variance_epsilon", getattr(stock, "eps", None))
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    x = torch.randn(shape).to(dtype).requires_grad_()
    inputs = [x, stock.weight.detach().requires_grad_()]
    mine, theirs = gradients(with_weight(ours), inputs), gradients(with_weight(stock), inputs)
    assert_equal_bits(mine[:1], theirs[:1])
    if dtype is torch.bfloat16 and name in COMPOSED:
        assert_equal_bits(mine, theirs)
    wide = [t.detach().double().requires_grad_() for t in inputs]

    def oracle(x: Tensor, weight: Tensor) -> Tensor:
        gain = 1 + weight if name == "gemma" else weight
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * gain

    assert_within_law(mine, theirs, gradients(oracle, wide))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_tiles_of_rows_change_no_bit(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors are computed in tiles. The incoming gradient may have any layout."""
    ours, _ = pair(name, dtype)
    x, dy = torch.randn(3, 5, WIDTH).to(dtype).requires_grad_(), torch.randn(5, 3, WIDTH).to(dtype)
    found = []
    for size in (tiles.TILE, TILE):
        monkeypatch.setattr(tiles, "TILE", size)
        inputs = [x, ours.weight.detach().requires_grad_()]
        for grad in (dy.view(3, 5, WIDTH), dy.transpose(0, 1)):
            found.append(gradients(with_weight(ours), inputs, grad))
    assert_equal_bits(found[2], found[0])
    assert_equal_bits(found[3], found[1])


@pytest.mark.parametrize("size", [tiles.TILE, TILE])
def test_heads_of_a_norm_are_known_by_their_transpose(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention sees the transpose, and nobody holds the norm's own result. It must be known with tiles, too."""
    monkeypatch.setattr(tiles, "TILE", size)
    ours, _ = pair("llama", torch.float32)
    with frame():
        heads = ours(torch.randn(2, 5, 3, WIDTH, requires_grad=True)).transpose(1, 2)
        assert isinstance(known_record(heads), Derived)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keeps_its_input_and_one_number_per_row(name, dtype):
    ours, _ = pair(name, dtype)
    x = torch.randn(2, 5, WIDTH).to(dtype).requires_grad_()

    def run() -> Tensor:
        with frame():
            return ours(-x)

    assert kept_bytes(run) == nbytes(x) + 4 * 10


@pytest.mark.parametrize("name", COMPOSED)
def test_fp32_input_into_a_bf16_norm_under_autocast(name):
    ours, stock = pair(name, torch.bfloat16)
    inputs = [torch.randn(2, 5, WIDTH, requires_grad=True), stock.weight.detach().requires_grad_()]

    def run(module: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        def call(x: Tensor, weight: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return with_weight(module)(x, weight)

        return call

    mine, theirs = gradients(run(ours), inputs), gradients(run(stock), inputs)
    assert_equal_bits(mine[:1], theirs[:1])
    assert [g.dtype for g in mine] == [g.dtype for g in theirs]


@pytest.mark.parametrize("name", NORMS)
def test_sharded_from_the_start(name):
    """ZeRO-3 leaves an empty weight and its size. On an empty weight all formulas give the same result."""
    norm = NORMS[name]()
    whole = find_site(norm, CompressionConfig())
    norm.weight.data = torch.empty(0)
    assert isinstance(find_site(norm, CompressionConfig()), Declined)
    norm.weight.ds_numel = WIDTH
    assert find_site(norm, CompressionConfig()) == whole
