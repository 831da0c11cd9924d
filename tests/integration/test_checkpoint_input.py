"""`CompressionConfig.checkpoint_input`: what a checkpointed layer keeps goes through a codec."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hf_actcompress import CompressionConfig, kept_bytes, memory_report, patch_model, patch_report, unpatch_model
from hf_actcompress.codecs.table import CODECS
from hf_actcompress.models.checkpointing import checkpointable
from hf_actcompress.reference.rng import Generators
from tests.families import BY_NAME, build, differing, step
from tests.slopes import bert, gpt2, llama, slope

NAMES = ("bert", "gpt2-gelu-tanh", "llama", "t5")
# the codecs that draw no random numbers, so that they round in the same way every time
STORES = [name for name, row in CODECS.items() if not row.linear_only and row.drawing_from(Generators()) is row]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def checkpointed(name: str, reentrant: bool = False, mode: str = "fp32", dropout: float = 0.1) -> Any:
    model = build(BY_NAME[name], mode, dropout=dropout)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def packed(codec: str = "int8") -> CompressionConfig:
    return CompressionConfig(checkpoint_input=codec)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_lossless_codec_changes_no_bit(name: str, reentrant: bool) -> None:
    model, batch = checkpointed(name, reentrant), BY_NAME[name].make_batch()
    expected = step(patch_model(model), batch)
    found = step(patch_model(model, packed("offload")), batch)
    assert torch.equal(found[0], expected[0])
    assert not differing(found[1], expected[1])


@pytest.mark.parametrize("codec", STORES)
def test_a_layer_is_computed_again_from_what_was_stored(codec: str) -> None:
    """The gradients of the last layer are those of a layer whose input was packed and unpacked by the codec."""
    model, batch = build(BY_NAME["llama"], "fp32"), BY_NAME["llama"].make_batch()
    model.config.use_cache = False
    last, seen = model.model.layers[-1], {}

    def note(module: Any, args: Any, kwargs: Any, y: Tensor) -> None:
        seen.update(x=args[0].detach(), kwargs=kwargs)
        y.register_hook(lambda dy: seen.update(dy=dy))

    handle = last.register_forward_hook(note, with_kwargs=True)
    step(model, batch)
    handle.remove()
    rounded = CODECS[codec].unpack(*CODECS[codec].pack(seen["x"])).requires_grad_()
    names, parameters = zip(*last.named_parameters(prefix="model.layers.1"), strict=True)
    expected = torch.autograd.grad(last(rounded, **seen["kwargs"]), parameters, seen["dy"])

    patch_model(model, CompressionConfig(checkpoint=("layers.1",), checkpoint_input=codec, loss_head=False))
    _, found = step(model, batch)
    # the differences are a few roundings of fp32
    for name, g in zip(names, expected, strict=True):
        assert float((found[name] - g).norm() / g.norm()) < 1e-6, name


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("codec", ["int8_outliers", "fp8_e4m3", "int4"])
def test_the_loss_is_stocks_and_a_second_step_too(name: str, codec: str) -> None:
    model, batch = checkpointed(name, mode="bf16"), BY_NAME[name].make_batch()
    expected = step(model, batch)
    patch_model(model, packed(codec))
    first, second = step(model, batch), step(model, batch)
    assert torch.equal(first[0], expected[0]) and torch.equal(second[0], expected[0])
    assert not differing(first[1], second[1])
    # the codec was used, so the gradients are not exactly stock's
    assert differing(first[1], expected[1])


@pytest.mark.parametrize(("model", "dtype_bytes"), [(bert, 2), (gpt2, 2), (llama, 2)])
def test_bytes_per_layer(model: Any, dtype_bytes: int) -> None:
    """int8 keeps one byte per element and 4 bytes for each 64 elements; int4 half a byte; without a codec it is two."""

    def prepare(config: CompressionConfig) -> Any:
        def patch(model: Any) -> Any:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            return patch_model(model, config)

        return patch

    plain, int8, outliers, int4, away = (
        slope(model, prepare=prepare(packed(codec)), length=128).kept
        for codec in ("identity", "int8", "int8_outliers", "int4", "offload")
    )
    # for its 256 tokens, a layer that draws random numbers also keeps an RNG state of about 5 KB
    rest = plain - dtype_bytes
    assert 0 <= rest < 0.2
    assert int8 - rest == pytest.approx(1.0625, abs=0.01)
    assert int8 < outliers <= 1.1 + rest
    assert int4 - rest == pytest.approx(0.5625, abs=0.01)
    # on a CPU, offloaded tensors stay in the same memory
    assert away == pytest.approx(plain, abs=0.01)


def test_hooks_outside_get_the_packed_tensors() -> None:
    model, batch = checkpointed("llama"), BY_NAME["llama"].make_batch()
    patch_model(model, packed("int8"))
    expected = step(model, batch)
    seen: list[torch.dtype] = []

    def pack(x: Tensor) -> Tensor:
        seen.append(x.dtype)
        return x.clone()

    with saved_tensors_hooks(pack, lambda x: x):
        found = step(model, batch)
    assert torch.int8 in seen or torch.uint8 in seen
    assert not differing(found[1], expected[1])


def test_whoever_asks_for_checkpointing_and_whenever() -> None:
    family = BY_NAME["llama"]
    model, batch = build(family, "fp32"), family.make_batch()
    patch_model(model, packed("int4"))
    plain = kept_bytes(lambda: model(**batch), "cpu")
    # Trainer also switches it on after patching
    model.gradient_checkpointing_enable({"use_reentrant": False})
    after = kept_bytes(lambda: model(**batch), "cpu")
    model.gradient_checkpointing_disable()
    assert kept_bytes(lambda: model(**batch), "cpu") == plain > after
    patch_model(model, CompressionConfig(checkpoint=("layers",), checkpoint_input="int4"))
    assert kept_bytes(lambda: model(**batch), "cpu") == after
    patch_model(model, CompressionConfig(checkpoint=("layers",)))
    assert kept_bytes(lambda: model(**batch), "cpu") > after


def test_one_layer_alone() -> None:
    model = build(BY_NAME["llama"], "fp32")
    config = CompressionConfig(checkpoint=("layers",), overrides=(("layers.1", "checkpoint_input", "int8"),))
    rows = [row for row in patch_report(patch_model(model, config)).rows if row.role == "checkpoint_input"]
    assert [(row.name, row.codec) for row in rows] == [("model.layers.1", "int8")]


def test_without_gradients_the_stock_code_runs() -> None:
    model, batch = checkpointed("llama", dropout=0.0), BY_NAME["llama"].make_batch()
    expected = model(**batch).loss.detach()
    patch_model(model, packed("int8"))
    with torch.no_grad():
        assert torch.equal(model(**batch).loss, expected)


def test_layers_keep_their_names_and_are_given_back() -> None:
    family = BY_NAME["llama"]
    stock, batch = build(family, "fp32"), family.make_batch()
    names = {name: type(layer).__name__ for name, layer in checkpointable(stock).items()}
    config = CompressionConfig(checkpoint=("layers",), checkpoint_input="int8")
    model = patch_model(copy.deepcopy(stock), config)
    expected = step(model, batch)
    assert differing(expected[1], step(stock, batch)[1])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert {name: type(layer).__name__ for name, layer in checkpointable(other).items()} == names
        assert not differing(step(other, batch)[1], expected[1])
        unpatch_model(other)
        assert [(type(m), sorted(m.__dict__)) for m in other.modules()] == [
            (type(m), sorted(m.__dict__)) for m in stock.modules()
        ]


def test_the_report_says_what_layers_keep() -> None:
    model, batch = checkpointed("llama", dropout=0.0), BY_NAME["llama"].make_batch()
    kept = {
        codec: sum(
            row.patched_bytes for row in memory_report(model, batch, packed(codec)).rows if row.role == "checkpoint"
        )
        for codec in ("identity", "int8")
    }
    assert 0 < kept["int8"] < 0.5 * kept["identity"]
