"""Groups along tokens: each channel has ranges of its own; attention then needs the statistics of stored values."""

from __future__ import annotations

import pytest
import torch

from hf_actcompress import CompressionConfig
from hf_actcompress.codecs import IntChannels, IntGroup, Offload
from hf_actcompress.errors import UnknownOptionError
from tests.codecs.helpers import DTYPES, LAYOUTS, relative, roundtrip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_group_quantisation_of_the_channels(layout: str, dtype: torch.dtype) -> None:
    x = LAYOUTS[layout](torch.randn(2, 3, 70, 16).to(dtype))
    y = roundtrip(IntChannels(5, 64), x)
    assert y.is_contiguous()
    assert torch.equal(y.mT, roundtrip(IntGroup(5, 64), x.mT.contiguous()))


def test_what_is_the_same_for_all_tokens_costs_nothing() -> None:
    """Each channel has its own offset and magnitude. In groups along features, both make every range wider."""
    x = torch.randn(2, 4, 256, 32)
    channels = x * torch.logspace(-2, 2, 32) + 100 * torch.randn(32)
    error = (roundtrip(IntChannels(4), channels) - channels) / torch.logspace(-2, 2, 32)
    alone = relative(roundtrip(IntChannels(4), x) - x, x)
    # the zero points are rounded to bf16, which widens the steps a little
    assert relative(error, x) < 4 * alone
    along_features = (roundtrip(IntGroup(4), channels) - channels) / torch.logspace(-2, 2, 32)
    assert relative(along_features, x) > 50 * alone


def test_bytes_per_element() -> None:
    shape = torch.Size((2, 8, 512, 64))
    assert IntChannels(5, 64).nbytes(shape, torch.bfloat16) == shape.numel() * (5 / 8 + 4 / 64)


def test_attention_needs_the_statistics_of_what_was_stored() -> None:
    CompressionConfig(attention="int5_channels", attention_variant="recomputed")
    assert Offload(IntChannels()).along_tokens and not Offload(IntGroup()).along_tokens
    with pytest.raises(UnknownOptionError, match="recomputed"):
        CompressionConfig(attention="int5_channels")
    with pytest.raises(UnknownOptionError, match="recomputed"):
        CompressionConfig(overrides=(("layers.1", "attention", "int4_channels"),))
