"""Weight gradients from what codecs keep are within the law for every format, tile and share of the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_actcompress import dispatch, reference
from hf_actcompress.kernels import KERNELS, TIMED, grad_weight
from hf_actcompress.methods.block_sparse.reference import block_sparse_pack, block_sparse_unpack
from hf_actcompress.methods.pooled.reference import pooled_pack, pooled_unpack
from hf_actcompress.methods.row_sample.reference import row_sample_pack
from hf_actcompress.reference.table import FUNCTIONS
from tests.kernels.harness import DEVICE, Args, check, every_case, poisoned, run, samples, specified

pytestmark = pytest.mark.daily(6)

every_name = pytest.mark.parametrize("name", TIMED)


def _int_group(dy: Tensor, packed: Tensor, scale: Tensor, zero: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    features, bits, group_size, *outliers = rest
    x = reference.int_group_unpack(packed, scale, zero, features, dy.dtype, bits, group_size)
    if outliers:
        values, channels = outliers
        x[:, channels.long()] = values
    return dy, x


def _float8(dy: Tensor, codes: Tensor, scale: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    return dy, reference.float8_unpack(codes, scale, dy.dtype, group_size)


def _block_sparse(dy: Tensor, values: Tensor, index: Tensor, features: int, _: str) -> tuple[Tensor, Tensor]:
    return dy, block_sparse_unpack(values, index, dy.size(0), features)


def _row_sample(dy: Tensor, rows: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    return dy[index], rows


def _pooled(dy: Tensor, pooled: Tensor, window: int) -> tuple[Tensor, Tensor]:
    return dy.flatten(0, -2), pooled_unpack(pooled, dy.size(-2), window).flatten(0, -2)


# the two factors of the product, dense
FACTORS = {
    "int_group_grad_weight": _int_group,
    "float8_grad_weight": _float8,
    "block_sparse_grad_weight": _block_sparse,
    "row_sample_grad_weight": _row_sample,
    "pooled_grad_weight": _pooled,
}


def within_the_law(name: str, args: Args) -> None:
    def terms(*wide: object) -> list[Tensor | None]:
        dy, x = FACTORS[name](*wide)
        return [dy.abs().t() @ x.abs()]

    check(name, args, terms)


def test_every_product_that_is_timed_is_held_to_the_law() -> None:
    assert set(FACTORS) == set(TIMED)
    # topk_grad_weight is a kernel that is followed by torch's product
    assert {name for name in KERNELS if name.endswith("grad_weight")} == {*FACTORS, "topk_grad_weight"}


@every_name
@every_case
def test_against_the_oracle(name: str, case: tuple[torch.dtype, int, int]) -> None:
    dtype, rows, width = case
    # for the widest row only the first sample, because the differences between samples do not depend on the width
    for args in list(samples(name, dtype, rows, width))[: 1 if width > 1000 else None]:
        within_the_law(name, args)


@every_name
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_in_shares_of_the_tokens(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grad_weight, "_SHARE", dict.fromkeys(("cpu", "cuda"), 48))
    seen: list[int] = []
    stock = grad_weight.launch_of

    def launch_of(*args: object) -> grad_weight.Launch:
        made = stock(*args)
        seen.append(made.sums.size(0))
        return made

    for codec in ("int_group", "block_sparse", "pooled"):
        monkeypatch.setattr(f"hf_actcompress.{KERNELS[f'{codec}_grad_weight']}.launch_of", launch_of)
    # codecs keep half of these 300 tokens, or a quarter
    args = next(samples(name, dtype, 300, 24))
    within_the_law(name, args)
    assert max(seen) > 1


@pytest.mark.parametrize("quota", ["column", "row", "global"])
@pytest.mark.parametrize("block", [(1, 1), (16, 40), (40, 3)], ids=str)
def test_tiles_of_any_size_by_any_quota(quota: str, block: tuple[int, int]) -> None:
    x, dy = torch.randn(37, 14, device=DEVICE), torch.randn(37, 6, device=DEVICE)
    packed = block_sparse_pack(x, block, 1 if quota != "global" else 2, quota)
    within_the_law("block_sparse_grad_weight", (dy, *packed, 14, quota))


def test_a_column_without_tiles_is_zero() -> None:
    x, dy = torch.randn(40, 96, device=DEVICE), torch.randn(40, 6, device=DEVICE)
    x[:, 32:64] *= 1e-3
    values, index = block_sparse_pack(x, (8, 32), 5, "global")
    (dweight,) = run("block_sparse_grad_weight", (dy, values, index, 96, "global"))
    assert dweight is not None and not dweight[:, 32:64].any() and dweight.isfinite().all()


@pytest.mark.parametrize("window", [1, 5, 8, 100])
def test_windows(window: int) -> None:
    x, dy = torch.randn(3, 21, 40, device=DEVICE), torch.randn(3, 21, 6, device=DEVICE)
    within_the_law("pooled_grad_weight", (dy, pooled_pack(x, window), window))


def test_as_many_features_and_outputs_as_tiles() -> None:
    """dW has several bands of tiles, and the last band is narrower."""
    tile = grad_weight.TILES[4]
    x = torch.randn(3, 2 * tile.features + 1, device=DEVICE)
    dy = torch.randn(3, 9 * tile.outputs + 1, device=DEVICE)
    within_the_law("row_sample_grad_weight", (dy, x, torch.arange(3, device=DEVICE, dtype=torch.int32)))


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["int_group_grad_weight", "float8_grad_weight"])
def test_numbers_that_are_none_stay_in_their_group(name: str, broken: float) -> None:
    x, dy = torch.randn(20, 40, device=DEVICE), torch.randn(20, 6, device=DEVICE)
    x[3, 11] = broken
    if name == "int_group_grad_weight":
        args: Args = (dy, *reference.int_group_pack(x, 4, 8, False), 40, 4, 8)
    else:
        args = (dy, *reference.float8_pack(x, torch.float8_e4m3fn, 8), 8)
    (ours,), (stock,) = run(name, args), specified(name, args)
    assert ours is not None and stock is not None
    assert torch.equal(ours.isfinite(), stock.isfinite()) and int((~ours.isfinite()).sum()) == 6 * 8


def test_the_ends_of_fp16_are_decoded_as_the_reference_does() -> None:
    x = torch.tensor([[65504.0, -65504.0, 3.0, 65000.0] * 4], device=DEVICE).half()
    dy = torch.full((1, 2), 0.5, device=DEVICE).half()
    for bits in (8, 4, 2):
        args: Args = (dy, *reference.int_group_pack(x, bits, 8, False), 16, bits, 8)
        (ours,), (stock,) = run("int_group_grad_weight", args), specified("int_group_grad_weight", args)
        assert ours is not None and ours.isfinite().all() and torch.equal(ours, stock)


@pytest.mark.parametrize(("setting", "precision"), [("highest", "ieee"), ("high", "tf32")])
def test_tf32_where_torch_allows_it(setting: str, precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        dy = torch.ones(2, 2, device=DEVICE)
        assert grad_weight.options(dy, grad_weight.tile_for(dy, 8))["PRECISION"] == precision
        # the setting is for products in fp32, and this one is in fp16
        assert grad_weight.options(dy.half(), grad_weight.tile_for(dy.half(), 8))["PRECISION"] == "ieee"
    finally:
        torch.set_float32_matmul_precision(before)


def test_outliers_are_exact() -> None:
    x, dy = torch.randn(20, 40, device=DEVICE), torch.randn(20, 6, device=DEVICE)
    channels = torch.tensor([7, 0], device=DEVICE, dtype=torch.int32)
    packed = reference.int_group_pack(x, 2, 8, False)
    with poisoned():
        dweight = grad_weight.int_group_grad_weight(dy, *packed, 40, 2, 8, x[:, channels], channels)
    assert torch.equal(dweight[:, channels], dy.t().mm(x[:, channels]))


class _Made(TorchDispatchMode):
    """Records the size of the largest tensor that an op has made, unless it is in the memory of an argument."""

    def __init__(self, args: Args) -> None:
        super().__init__()
        self.bytes, self._given = 0, {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self._given:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result


def _kept_rows(dy: Tensor, x: Tensor) -> Args:
    return dy, *row_sample_pack(x, 64, True, False)


def _kept_tiles(quota: str) -> Callable[[Tensor, Tensor], Args]:
    k = {"column": 2, "row": 2, "global": 16}[quota]
    return lambda dy, x: (dy, *block_sparse_pack(x, (32, 32), k, quota), x.size(1), quota)


STORED: dict[str, tuple[str, Callable[[Tensor, Tensor], Args]]] = {
    "rows": ("row_sample_grad_weight", _kept_rows),
    **{f"tiles by {quota}": ("block_sparse_grad_weight", _kept_tiles(quota)) for quota in ("column", "row", "global")},
    "means": (
        "pooled_grad_weight",
        lambda dy, x: (dy.view(2, 256, -1), pooled_pack(x.view(2, 256, -1), 8), 8),
    ),
    "codes": (
        "int_group_grad_weight",
        lambda dy, x: (dy, *reference.int_group_pack(x, 4, 64, False), x.size(1), 4, 64),
    ),
    "fp8": ("float8_grad_weight", lambda dy, x: (dy, *reference.float8_pack(x, torch.float8_e4m3fn, 128), 128)),
}


@pytest.mark.parametrize("implementation", ["kernel", "reference"])
@pytest.mark.parametrize("stored", STORED)
def test_the_dense_input_is_never_made(stored: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor that is made is smaller than a quarter of x. Only the reference must unpack all codes at once."""
    # with the GPU's smallest share there is only one share for so few tokens, and so only one sum
    monkeypatch.setattr(grad_weight, "_SHARE", dict.fromkeys(("cpu", "cuda"), 512))
    name, pack = STORED[stored]
    x, dy = torch.randn(512, 256, device=DEVICE), torch.randn(512, 8, device=DEVICE)
    args = pack(dy, x)
    function = FUNCTIONS[name] if implementation == "reference" else getattr(dispatch._module(name), name)
    with _Made(args) as made:
        function(*args)
    dense = x.numel() * x.element_size()
    if implementation == "reference" and stored in ("codes", "fp8"):
        assert made.bytes >= dense
    else:
        assert 0 < made.bytes < dense / 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_linears_of_models_have_the_tiles_that_are_compiled_ahead_of_time(dtype: torch.dtype) -> None:
    """recipes/compile_kernels.py compiles for rows of 4096. Launches for other widths could only differ in the tile."""
    dy = torch.empty(1, 1, dtype=dtype)
    for short in (False, True):
        compiled = grad_weight.tile_for(dy, 4096, short)
        assert {grad_weight.tile_for(dy, width, short) for width in (768, 2048, 8192, 14336)} == {compiled}
