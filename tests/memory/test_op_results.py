"""Remembered results of ops on an estimate's fake tensors are what torch returns for such arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_actcompress.memory.estimation.fake_step.op_results import OpCalls, OpResults
from hf_actcompress.private_apis import FakeTensor, FakeTensorMode

aten = torch.ops.aten
# op -> its arguments after the first one, which is a tensor [4, 6]
OPS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "pointwise": (aten.mul.Tensor, (2.0,)),
    "a sum": (aten.sum.default, ()),
    "a view": (aten.transpose.int, (0, 1)),
    "a part": (aten.slice.Tensor, (0, 1, 3)),
    "in place": (aten.add_.Tensor, (1.0,)),
    "several": (aten.max.dim, (0,)),
    "views in a list": (aten.split.Tensor, (2, 1)),
    "indices": (aten.topk.default, (2,)),
}


@pytest.mark.parametrize("name", OPS)
def test_the_second_result_is_as_torch_makes_it(name: str) -> None:
    op, arguments = OPS[name]
    known = OpResults()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        # a part of a larger tensor, so that offset and strides count
        xs = [torch.empty(5, 6, dtype=torch.bfloat16)[1:] for _ in range(3)]
        expected = op(xs[0], *arguments)
        OpCalls(known)(op, (xs[1], *arguments), {})
        assert list(known.values()) != [None]
        found = OpCalls(known)(op, (xs[2], *arguments), {})
    assert type(found) is type(expected)
    several = isinstance(found, (tuple, list))
    for mine, torchs in zip(found if several else [found], expected if several else [expected], strict=True):
        assert type(mine) is FakeTensor and vars(mine).keys() == vars(torchs).keys()
        assert mine.fake_mode is mode and mine.device == torchs.device and mine.constant is None
        assert (mine.shape, mine.stride(), mine.dtype) == (torchs.shape, torchs.stride(), torchs.dtype)
        assert mine.storage_offset() == torchs.storage_offset()
        assert mine.untyped_storage().nbytes() == torchs.untyped_storage().nbytes()
        shared = torchs.untyped_storage()._cdata == xs[0].untyped_storage()._cdata
        assert (mine.untyped_storage()._cdata == xs[2].untyped_storage()._cdata) == shared
        assert (mine is xs[2]) == (torchs is xs[0])


@pytest.mark.parametrize("name", OPS)
def test_a_result_of_another_size_is_as_torch_makes_it(name: str) -> None:
    op, arguments = OPS[name]
    known = OpResults()
    with FakeTensorMode(allow_non_fake_inputs=True):
        calls, torchs = OpCalls(known), OpCalls(OpResults())
        for rows in (5, 9):
            x, y = (torch.empty(rows, 6, dtype=torch.bfloat16)[1:] for _ in range(2))
            found, expected = (one(op, (z, *arguments), {}) for one, z in ((calls, x), (torchs, y)))
            for mine, torch_s in zip(
                *(z if isinstance(z, (tuple, list)) else [z] for z in (found, expected)), strict=True
            ):
                assert (mine.shape, mine.stride(), mine.dtype) == (torch_s.shape, torch_s.stride(), torch_s.dtype)
                assert mine.storage_offset() == torch_s.storage_offset() and mine.device == torch_s.device
                shared = torch_s.untyped_storage()._cdata == y.untyped_storage()._cdata
                assert (mine.untyped_storage()._cdata == x.untyped_storage()._cdata) == shared
    assert list(known.kinds.values()) == [True]


def test_an_op_that_gives_an_argument_another_shape_is_asked_of_torch() -> None:
    known = OpResults()
    with FakeTensorMode(allow_non_fake_inputs=True):
        calls = OpCalls(known)
        for rows, out_rows in ((4, 4), (6, 6), (8, 0)):
            x, out = torch.empty(rows, 6), torch.empty(out_rows, 6)
            assert calls(aten.mul.out, (x, x), {"out": out}) is out
            assert out.shape == (rows, 6) and out.untyped_storage().nbytes() == rows * 6 * 4
    # only the result of the last call is not remembered
    assert [found is None for found in known.values()] == [False, False, True]


def test_an_empty_tensor_is_what_its_arguments_say() -> None:
    known = OpResults()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        calls = OpCalls(known)
        for dtype in (torch.bfloat16, torch.complex64):
            found = calls(aten.empty_strided.default, ([4, 6], [8, 1]), {"dtype": dtype, "device": torch.device("cpu")})
            torchs = torch.empty_strided([4, 6], [8, 1], dtype=dtype)
            assert type(found) is FakeTensor and found.fake_mode is mode and found.device == torchs.device
            assert (found.shape, found.stride(), found.dtype) == (torchs.shape, torchs.stride(), torchs.dtype)
            assert found.untyped_storage().nbytes() == torchs.untyped_storage().nbytes()
        on_meta = calls(aten.empty_strided.default, ([4], [1]), {"dtype": dtype, "device": torch.device("meta")})
        assert on_meta.device.type == "meta"


def test_what_the_meta_device_says_otherwise_is_asked_of_torch() -> None:
    known, normed = OpResults(), []
    with FakeTensorMode(allow_non_fake_inputs=True):
        for rows in (4, 8):
            x, weight = torch.empty(rows, 6, dtype=torch.bfloat16), torch.empty(6, dtype=torch.bfloat16)
            arguments = (x, [6], weight, weight, 1e-5)
            normed.append(OpCalls(known)(aten.native_layer_norm.default, arguments, {})[1])
            assert normed[-1].dtype == aten.native_layer_norm.default(*arguments)[1].dtype
    real: list[bool] = list(known.kinds.values())
    assert len(real) == 1


def test_what_changes_an_argument_and_what_is_real_goes_to_torch() -> None:
    known = OpResults()
    calls = OpCalls(known)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(4, 6)
        calls(aten.resize_.default, (x, [8, 6]), {})
        assert x.shape == (8, 6) and list(known.values()) == [None]
    real = [calls(aten.ones.default, ([2],), {}) for _ in range(2)]
    assert all(type(x) is torch.Tensor and x.tolist() == [1.0, 1.0] for x in real)
    with FakeTensorMode():
        assert all(type(calls(aten.ones.default, ([2],), {})) is FakeTensor for _ in range(2))
