"""ActNN, Mesa, GACT: no bias; more bits for samples with wide ranges, and ranges that follow."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.codecs import Codec, IntGroup
from hf_actcompress.errors import UnknownOptionError
from hf_actcompress.methods.actnn.codec import IntRanked
from hf_actcompress.methods.gact.codec import IntMeasured
from hf_actcompress.methods.mesa.codec import IntRunning
from hf_actcompress.models.root import root_of
from hf_actcompress.reference import seed_codecs
from hf_actcompress.reference.rng import Generators
from tests.codecs.helpers import gradient, gradient_error, relative, roundtrip
from tests.families import BY_NAME

STOCHASTIC = [IntRanked(), IntRanked(3, 32), IntRunning(), IntRunning(16), IntMeasured(2), IntMeasured(4, 64)]


@pytest.mark.parametrize("codec", STOCHASTIC, ids=str)
@pytest.mark.parametrize("shape", [(8, 300), (2, 3, 8, 32)], ids=str)
def test_unbiased(codec: Codec, shape: tuple[int, ...]) -> None:
    """z-scores: the mean of many draws is as far from x as their spread says. In fp64, without a last rounding."""
    seed_codecs(1)
    x = torch.randn(shape, dtype=torch.float64) * torch.logspace(-2, 1, shape[-1], dtype=torch.float64)
    draws = torch.stack([roundtrip(codec, x) for _ in range(200)])
    spread = draws.std(0)
    z = ((draws.mean(0) - x) / (spread / math.sqrt(len(draws)))).masked_select(spread > 1e-9)
    assert z.numel() > 0.5 * x.numel()
    # of n independent scores with variance 1 (a draw that is seldom has a wider one): five deviations of their mean
    assert abs(float(z.mean())) < 5 / math.sqrt(z.numel())
    assert float(z.abs().median()) < 1


@pytest.mark.parametrize("keep_sign", [False, True])
def test_unbiased_where_samples_differ(keep_sign: bool) -> None:
    """z-scores again, with samples of 1 to 8 bits. With signs kept, values of one sign alone: no sign has to move."""
    seed_codecs(3)
    x = torch.rand(16, 3, 40, dtype=torch.float64) * torch.logspace(-3, 1, 16, dtype=torch.float64).view(16, 1, 1)
    codec = IntRanked(keep_sign=keep_sign)
    widths = codec.pack(x)[0][3]
    assert int(widths.sum()) == 2 * 16 and (int(widths.max()) > 4) != keep_sign
    draws = torch.stack([roundtrip(codec, x) for _ in range(400)])
    spread = draws.std(0)
    z = ((draws.mean(0) - x) / (spread / math.sqrt(len(draws)))).masked_select(spread > 1e-9)
    assert abs(float(z.mean())) < 5 / math.sqrt(z.numel()) and float(z.square().mean()) < 1.5


@pytest.mark.parametrize(("samples", "bits"), [(1, 2), (7, 2), (64, 3), (5, 8)])
def test_the_mean_of_bits_is_fixed(samples: int, bits: int) -> None:
    """And the bits are the best ones: moving a bit from one sample to another never lowers the sum of variances."""
    x = torch.randn(samples, 300) * torch.exp(2 * torch.randn(samples, 1))
    widths = IntRanked(bits).pack(x)[0][3].tolist()
    assert sum(widths) == bits * samples and min(widths) >= 1 and max(widths) <= 8
    sensitivity = [float((row.max() - row.min()) ** 2) for row in x.tensor_split(samples) for row in [row[:, :256]]]
    # the two groups of a sample have nearly one range, and two decimals are enough
    cost = [[s / (2**b - 1) ** 2 for b in range(1, 10)] for s in sensitivity]
    for i, more in enumerate(widths):
        for j, less in enumerate(widths):
            if i != j and more < 8 and less > 1:
                won, lost = cost[i][more - 1] - cost[i][more], cost[j][less - 2] - cost[j][less - 1]
                assert won < 2 * lost


def test_equal_samples_have_equal_bits() -> None:
    x = torch.randn(1, 512).expand(6, 512).contiguous()
    assert IntRanked().pack(x)[0][3].tolist() == [2] * 6


def test_bits_by_sample_pay_in_the_gradient() -> None:
    """A linear layer's gradient on samples of different scales: less error than from 2 bits each, in as many bytes."""
    seed_codecs(2)
    x = torch.randn(16, 24, 256) * torch.logspace(-1.5, 0.5, 16).view(16, 1, 1)
    dy = torch.randn(16, 24, 8).flatten(0, 1)
    exact = dy.T @ x.flatten(0, 1)

    def error_of(codec: Codec) -> float:
        errors = [relative(dy.T @ roundtrip(codec, x).flatten(0, 1) - exact, exact) ** 2 for _ in range(10)]
        return math.sqrt(sum(errors) / len(errors))

    ranked, uniform = IntRanked(), IntGroup(2, 256, "stochastic")
    # one byte for each sample, which says how many bits it has
    assert ranked.nbytes(x.shape, x.dtype) == uniform.nbytes(x.shape, x.dtype) + 16
    assert sum(t.nbytes for t in ranked.pack(x)[0]) == ranked.nbytes(x.shape, x.dtype)
    # from 0.76 to 0.30
    assert error_of(ranked) < 0.6 * error_of(uniform)


def test_a_range_follows() -> None:
    codec = IntRunning(4, decay=0.5).drawing_from(Generators(0)).used_in("h.0", "norm")
    first, wider = torch.tensor([[0.0, 1.0, 2.0, 3.0]]), torch.tensor([[0.0, 1.0, 2.0, 11.0]])
    assert float(roundtrip(codec, first).max()) == pytest.approx(3, abs=3 / 255)
    # half of the way from 3 to 11; what lies above is clamped and does not wrap around
    assert float(roundtrip(codec, wider).max()) == pytest.approx(7, abs=7 / 255)
    # a tensor that is not finite shows it, and leaves no trace
    assert not roundtrip(codec, wider * math.inf).isfinite().all()
    assert float(roundtrip(codec, wider).max()) == pytest.approx(9, abs=9 / 255)
    # several tensors at one place, and a codec of no model, have their own ranges
    for other in (IntRunning(4), IntRunning(4).drawing_from(Generators(0)).used_in("h.0", "attention")):
        for x in (first, wider, first):
            assert float((roundtrip(other, x) - x).abs().max()) <= float(x.max()) / 255 * 1.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_signs_are_kept_where_the_range_has_them(dtype: torch.dtype) -> None:
    x = torch.randn(400, 7).to(dtype)
    plain, signed = (roundtrip(codec, x) for codec in (IntRunning(7), IntRunning(7).keeping_sign()))
    assert torch.equal(signed > 0, x > 0) and not torch.equal(plain > 0, x > 0)
    step = float((x.max() - x.min()).double()) / 255
    assert float((signed.double() - x.double()).abs().max()) <= step + 4 * torch.finfo(dtype).eps * float(x.abs().max())


@pytest.mark.parametrize("axis", [1, 2, 3])
def test_each_head_and_each_channel_has_its_range(axis: int) -> None:
    """Heads [B, H, S, D], channels [B, C, H, W], heads side by side [B, S, H, D], and features behind pixels."""
    wide = torch.ones(3)
    wide[1] = 100
    x = (torch.rand(2, 5, 3, 8).transpose(2, axis) if axis < 3 else torch.rand(2, 5, 8, 3)) * wide.view(
        [3 if i == axis else 1 for i in range(4)]
    )
    of_features = IntRunning(1).drawing_from(Generators(0)).used_in("h.0", "linear")
    codec = {1: IntRunning(), 2: IntRunning().part("q", heads=True), 3: of_features}[axis]
    tensors, meta = codec.pack(x)
    error = (codec.unpack(tensors, meta) - x).abs()
    assert float(error.index_select(axis, torch.tensor([0, 2])).max()) <= 1 / 255 * 1.01
    assert tensors[1].shape == (2, 3) and sum(t.nbytes for t in tensors) == codec.nbytes(x.shape, x.dtype)


def small_resnet() -> Any:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"}
    torch.manual_seed(0)
    return ResNetForImageClassification(ResNetConfig(**sizes, num_labels=4)).train()


def test_channels_of_a_resnet_have_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each channel has two numbers, for all images and pixels: maps of 8 by 8 pixels pay nothing for short lines."""
    batch = {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.arange(8) % 4}
    stock = small_resnet()
    exact = gradient(copy.deepcopy(stock), batch)
    ranges: dict[torch.Size, int] = {}
    pack = IntRunning.pack

    def noting(self: IntRunning, x: Tensor) -> Any:
        tensors, meta = pack(self, x)
        ranges[x.shape] = tensors[1].numel()
        return tensors, meta

    monkeypatch.setattr(IntRunning, "pack", noting)
    # the range of a channel is some 8 deviations, in 255 steps
    assert gradient_error(patch_model(copy.deepcopy(stock), "mesa", seed=0), batch, exact) < 8 / 255
    maps = {shape: count for shape, count in ranges.items() if len(shape) > 2}
    assert maps and all(len(shape) == 4 and count == 2 * shape[1] for shape, count in maps.items())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("padding", ["none", "right"])
def test_queries_keys_values_gate_and_up_have_running_ranges(padding: str) -> None:
    """One range per head, known by the tensor's name; a step with larger weights moves it a tenth of the way."""
    model, batch = BY_NAME["llama"].build(torch.float32), BY_NAME["llama"].make_batch(padding)
    patch_model(model, "mesa", seed=0)
    gradient(model, batch)
    root = root_of(model)
    assert root is not None
    learnt: dict[str, Tensor] = root.generators.learnt
    config, place = model.config, "model.layers.0."
    heads = {"q": config.num_attention_heads, "output": config.num_attention_heads}
    heads |= {"k": config.num_key_value_heads, "v": config.num_key_value_heads}
    assert {name: learnt[f"{place}self_attn {name}"].size(1) for name in heads} == heads
    before = {name: learnt[f"{place}{name}"].clone() for name in ("self_attn v", "mlp gate", "mlp up")}
    with torch.no_grad():
        layer = model.model.layers[0]
        for projection in (layer.self_attn.v_proj, layer.mlp.gate_proj, layer.mlp.up_proj):
            projection.weight.mul_(2)
    gradient(model, batch)
    torch.testing.assert_close(learnt[f"{place}self_attn v"], before["self_attn v"] * 1.1)
    # what the MLP reads has changed, too, so by no more than the attention's new output
    for name in ("mlp gate", "mlp up"):
        assert not torch.equal(learnt[f"{place}{name}"], before[name])


def test_options_that_do_not_fit() -> None:
    with pytest.raises(UnknownOptionError, match="int4_measured"):
        CompressionConfig(refresh_bits=10)
    with pytest.raises(ValueError, match="decay"):
        IntRunning(decay=1.0)
    with pytest.raises(UnknownOptionError, match="bits"):
        IntRanked(9)
    with pytest.raises(ValueError, match="group_size"):
        IntRanked(group_size=0)
