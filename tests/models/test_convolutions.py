"""Convolutional models: `exact` computes what stock does; with pooling, gradients of weights come from pooled maps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from hf_actcompress import CompressionConfig, kept_bytes, ops, patch_model, patch_report
from hf_actcompress.codecs.feature_maps import on_feature_maps
from hf_actcompress.codecs.table import CODECS
from hf_actcompress.methods.pooled.codec import Pooled
from hf_actcompress.methods.row_sample.codec import RowSample
from hf_actcompress.reference import seed_codecs
from tests.families import Gradients, cast_batch, differing, mode_of, relative_error
from tests.oracle import assert_equal_bits, gradients

POOLED = {name: CompressionConfig(linear=name, derive_linear=False) for name in ("pool2x2", "pool4x4")}
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.daily(3)]


def resnet(layer_type: str = "basic", depth: int = 2) -> Any:
    torch.manual_seed(0)
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[depth, 1], layer_type=layer_type)
    return hf.ResNetForImageClassification(config).train()


def efficientnet() -> Any:
    """A model with SiLU, depthwise convolutions (which have a class of their own) and padding by a module."""
    torch.manual_seed(0)
    config = hf.EfficientNetConfig(
        width_coefficient=0.25, depth_coefficient=0.1, image_size=64, hidden_dim=320, dropout_rate=0.1
    )
    return hf.EfficientNetForImageClassification(config).train()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randn(4, 3, 64, 64, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 2, (4,), generator=generator)}


def step(model: Any, mode: str = "fp32", memory_format: torch.memory_format = torch.contiguous_format) -> Gradients:
    """The loss and every gradient, that of the pixels too."""
    dtype = next(model.parameters()).dtype
    inputs = cast_batch(batch(), dtype)
    pixels = inputs["pixel_values"].to(memory_format=memory_format).requires_grad_()
    torch.manual_seed(7)
    with mode_of(mode):
        loss = model(pixel_values=pixels, labels=inputs["labels"]).loss
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {"loss": loss.detach(), "pixels": pixels.grad, **found}


def convolutions(model: nn.Module) -> set[str]:
    return {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}


MODELS = {"basic": resnet, "bottleneck": lambda: resnet("bottleneck"), "efficientnet": efficientnet}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["fp32", "bf16", "autocast"])
def test_exact_is_bit_equal(name: str, mode: str) -> None:
    stock = MODELS[name]().to(torch.bfloat16 if mode == "bf16" else torch.float32)
    ours = patch_model(copy.deepcopy(stock))
    expected = step(stock, mode)
    assert convolutions(stock) <= expected.keys()
    assert not differing(step(ours, mode), expected)


def test_channels_last() -> None:
    stock = resnet().to(memory_format=torch.channels_last)
    ours = patch_model(copy.deepcopy(stock))
    pooled = patch_model(copy.deepcopy(stock), POOLED["pool2x2"])
    expected = step(stock, memory_format=torch.channels_last)
    assert not differing(step(ours, memory_format=torch.channels_last), expected)
    found = step(pooled, memory_format=torch.channels_last)
    assert convolutions(stock) <= set(differing(found, expected))
    # ReLU's backward from bits returns dx in another memory order. BatchNorm then sums in another order, which changes
    # a few roundings of fp32
    others = {n: g.double() for n, g in expected.items() if n not in convolutions(stock)}
    assert relative_error(found, others) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_exact_keeps_no_more_than_stock(name: str) -> None:
    stock = MODELS[name]()
    before = kept_bytes(lambda: stock(**batch()), "cpu")
    ours = kept_bytes(lambda: patch_model(stock)(**batch()), "cpu")
    # of the outputs of a BatchNorm and the ReLU after it, stock keeps one; with SiLU it keeps both
    assert ours < before if name == "efficientnet" else ours <= before


@pytest.mark.parametrize("name", ["basic", "bottleneck"])
@pytest.mark.parametrize("mode", ["fp32", "bf16", "autocast"])
def test_pooling_touches_the_weights_of_convolutions_alone(name: str, mode: str) -> None:
    stock = MODELS[name]().to(torch.bfloat16 if mode == "bf16" else torch.float32)
    expected = step(stock, mode)
    errors = []
    for config in POOLED.values():
        found = step(patch_model(copy.deepcopy(stock), config), mode)
        # the loss, the pixels' gradient, those of all BatchNorms and of the classifier are bit-equal
        assert set(differing(found, expected)) == convolutions(stock)
        errors.append(relative_error(found, {n: g.double() for n, g in expected.items() if n in convolutions(stock)}))
    assert 0 < errors[0] < errors[1] < 1.5


@pytest.mark.parametrize("preset", ["dropit", "blocksparse", "pooled", "sampled", "wtacrs"])
def test_the_papers_estimators_touch_the_weights_alone(preset: str) -> None:
    stock = resnet("bottleneck")
    expected = step(stock)
    found = step(patch_model(copy.deepcopy(stock), preset))
    # the classifier's input is one vector per image: pooled finds no neighbours to average, and for blocksparse all
    # vectors lie in one tile
    classifier = set() if preset in ("pooled", "blocksparse") else {"classifier.1.weight"}
    assert set(differing(found, expected)) == convolutions(stock) | classifier


# bytes per pixel and channel of a layer of two convolutions, in fp32. The first term is what BatchNorm keeps. The
# others are what ReLU and the next convolution keep; in stock the two share one tensor. exact computes the ReLUs'
# outputs and the sum again from what the BatchNorms keep. dropit keeps 205 of an image's 2048 entries, and one bit for
# each entry
PER_LAYER = {
    "stock": 2 * (4 + 4),
    "exact": 2 * 4,
    "pool2x2": 2 * (4 + 1 / 8 + 4 / 4),
    "pool4x4": 2 * (4 + 1 / 8 + 4 / 16),
    "pooled": 2 * (4 + 1 / 8 + 4 / 4),
    "dropit": 2 * (4 + 1 / 8 + (205 * 4 + 256) / 2048),
}


# the share of stock's kept bytes that a ResNet-18 keeps for two images of 224 x 224. Every preset keeps the indices of
# the stem's pooling
RESNET_18 = {
    "exact": 0.50,
    "dropit": 0.74,
    "blocksparse": 0.80,
    "pooled": 0.78,
    "sampled": 0.80,
    "int8": 0.21,
    "mesa": 0.20,
    "gact": 0.18,
    "actnn": 0.08,
}


def test_a_resnet_18() -> None:
    """The bounds are the measured shares, rounded up; ``pytest -s`` prints them."""
    config = hf.ResNetConfig(embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2] * 4, layer_type="basic")
    model = hf.ResNetForImageClassification(config).train()
    images = {"pixel_values": torch.randn(2, 3, 224, 224), "labels": torch.tensor([1, 0])}
    stock = kept_bytes(lambda: model(**images), "cpu")
    for preset, bound in RESNET_18.items():
        share = kept_bytes(lambda preset=preset: patch_model(model, preset)(**images), "cpu") / stock
        print(f"{preset}: {share:.3f}")
        assert bound - 0.02 < share <= bound, preset


@pytest.mark.parametrize("side", [7, 14, 20])
def test_a_batch_norms_input_is_packed_however_short_its_lines_are(side: int) -> None:
    model = nn.Sequential(nn.Conv2d(8, 32, 1), nn.BatchNorm2d(32))
    x = torch.randn(2, 8, side, side)
    kept = kept_bytes(lambda: patch_model(model, "int8")(x).square().mean(), "cpu") - 2 * 32 * 4
    # kept are the BatchNorm's output (the square reads it), the loss, a code per element, and two bf16 numbers per
    # group of an image
    elements = 2 * 32 * side * side
    assert kept == 4 * elements + 4 + elements + 2 * 4 * -(-elements // 2 // 64)


@pytest.mark.parametrize("name", PER_LAYER)
def test_bytes_per_layer(name: str) -> None:
    kept = []
    for depth in (2, 3):
        model = resnet(depth=depth)
        if name != "stock":
            patch_model(model, POOLED.get(name, name))
        kept.append(kept_bytes(lambda model=model: model(**batch()), "cpu"))
    # the first stage sees a quarter of the image's height and width; mean and 1 / deviation of two BatchNorms
    pixels, statistics = 4 * 16 * 16, 2 * 2 * 8 * 4
    assert kept[1] - kept[0] == PER_LAYER[name] * pixels * 8 + statistics


def test_the_pixels_are_kept_as_they_are() -> None:
    """The caller holds them in any case, so a pooled copy would need additional memory."""
    stock, ours = resnet(), patch_model(resnet(), POOLED["pool4x4"])
    (loss, expected), (ours_loss, found) = (
        (
            loss,
            dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True)),
        )
        for model in (stock, ours)
        for loss in [model(**batch()).loss]
    )
    assert torch.equal(ours_loss, loss)
    first = "resnet.embedder.embedder.convolution.weight"
    assert set(differing(found, expected)) == convolutions(stock) - {first}


CODECS_OF_MAPS = [
    Pooled(2, "image"),
    Pooled(4, "image"),
    *(CODECS[n] for n in ("int8", "topk10", "block30", "wtacrs30")),
]
GEOMETRIES = {
    "3x3": ((1, 1), (1, 1), (1, 1), 1),
    "groups": ((2, 2), (0, 1), (1, 2), 2),
    "1x1": ((1, 1), (0, 0), (1, 1), 1),
}


@pytest.mark.parametrize("codec", CODECS_OF_MAPS, ids=str)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_weights_gradient_is_that_of_what_was_stored(codec: Any, name: str) -> None:
    geometry, kernel = GEOMETRIES[name], 1 if name == "1x1" else 3
    x = torch.randn(2, 40, 9, 7, requires_grad=True, dtype=torch.float64)
    weight = torch.randn(6, 40 // geometry[3], kernel, kernel, requires_grad=True, dtype=x.dtype)
    bias = torch.randn(6, requires_grad=True, dtype=x.dtype)

    def stock(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.conv2d(x, weight, bias, *geometry)

    seed_codecs(0)
    ours = gradients(lambda *inputs: ops.conv2d(*inputs, geometry, codec=codec), [x, weight, bias])
    y, dx, _, dbias = gradients(stock, [x, weight, bias])
    maps = on_feature_maps(codec)
    seed_codecs(0)
    tensors, meta = maps.pack(x.detach())
    assert sum(t.nbytes for t in tensors) == maps.nbytes(x.shape, x.dtype)
    stored = maps.unpack(tensors, meta)
    assert not torch.equal(stored, x)
    dweight = gradients(stock, [stored.requires_grad_(), weight, bias])[2]
    if name == "1x1" and maps.has_grad_weight(y):
        # a product over the kept pixels alone adds in another order, here in fp64
        torch.testing.assert_close(ours[2], dweight)
        ours[2] = dweight
    assert_equal_bits(ours, [y, dx, dweight, dbias])


def test_pixels_that_are_drawn_are_a_share_of_the_product() -> None:
    """A convolution with kernels of one pixel is a linear layer, so sampling saves the same share of its product."""
    x, weight = torch.randn(2, 8, 10, 10, requires_grad=True), torch.randn(4, 8, 1, 1, requires_grad=True)
    y = ops.conv2d(x, weight, None, GEOMETRIES["1x1"], codec=RowSample(0.3), derive=False)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(y, [x, weight], torch.ones_like(y))
    # dx needs all pixels
    assert counter.get_total_flops() == (1 + 0.3) * 2 * 200 * 8 * 4


def test_what_is_left_alone_or_otherwise_than_asked() -> None:
    class Own(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(4, 4, 2, padding="same"),
        Own(4, 4, 1),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Flatten(2),
        nn.Linear(64, 2),
    )
    x = torch.randn(2, 3, 8, 8)
    expected = model(x)
    by_name = {row.name: row for row in patch_report(patch_model(model, POOLED["pool2x2"])).rows}
    assert ["zeros" in by_name["0"].reason, "unevenly" in by_name["1"].reason, "Own" in by_name["2"].reason] == [
        True
    ] * 3
    assert by_name["3"].codec == "pool2x2"
    # pool2x2 needs maps with two spatial axes, which tokens and features are not
    assert by_name["5"].codec == "identity" and "feature maps" in by_name["5"].note
    assert torch.equal(model(x), expected)
    # a codec for tokens also applies to feature maps
    tokens = {row.name: row for row in patch_report(patch_model(model, "pooled")).rows}
    assert [tokens[name].codec for name in ("3", "5")] == ["pool2", "pool2"]


@pytest.mark.parametrize("name", ["pool2x2", "topk10", "block30"])
def test_a_compiled_convolution_stores_as_the_eager_one(name: str) -> None:
    x, weight = torch.randn(2, 40, 6, 5, requires_grad=True), torch.randn(3, 40, 3, 3, requires_grad=True)

    def convolution(x: Tensor, weight: Tensor) -> Tensor:
        return ops.conv2d(x, weight, None, GEOMETRIES["3x3"], codec=CODECS[name], derive=False)

    compiled = torch.compile(convolution, fullgraph=True, backend="aot_eager")
    assert_equal_bits(gradients(compiled, [x, weight]), gradients(convolution, [x, weight]))
