"""torchao's float8 training: its layers keep their inputs in high precision, and a patched model keeps fewer of them.

On a CPU the products of float8 are emulated (`emulate=True`): the values are rounded to float8 and multiplied in fp32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_actcompress import kept_bytes, patch_model, patch_report, unpatch_model
from tests.families import Batch, Gradients, differing, relative_error, step

float8 = pytest.importorskip("torchao.float8")
pytestmark = pytest.mark.filterwarnings("ignore")
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
WEIGHTS = {"fp32": torch.float32, "bf16": torch.bfloat16}
# the shares of stock's kept bytes: under exact, under int8
SHARES = {"fp32": (0.57, 0.26), "bf16": (0.49, 0.34)}


def batch() -> Batch:
    ids = torch.randint(3, 256, (2, 64), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def llama(weights: str = "fp32") -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(WEIGHTS[weights]).train()


def converted(model: Any, recipe: str = "tensorwise", head: bool = False) -> Any:
    """The model with float8 layers, the head left out as torchao's examples have it."""
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    return float8.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: head or "lm_head" not in name
    )


def kept(model: Any) -> int:
    return kept_bytes(lambda: model(**batch()).loss, "cpu")


def assert_same(found: Gradients, expected: Gradients, weights: str) -> None:
    """In fp32 up to sums in another order. In bf16 a few values of one gradient may round to the other side."""
    assert found.keys() == expected.keys()
    assert relative_error(found, expected) < (1e-6 if weights == "fp32" else 1e-4)
    assert weights == "fp32" or len(differing(found, expected)) <= 2


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_exact(recipe: str, weights: str) -> None:
    """The loss is stock's, and so are the gradients; the types come back."""
    stock, model = (converted(llama(weights), recipe) for _ in range(2))
    patch_model(model)
    (loss, expected), (ours, found) = step(stock, batch()), step(model, batch())
    assert torch.equal(ours, loss)
    assert_same(found, expected, weights)
    assert kept(model) <= SHARES[weights][0] * kept(stock)
    unpatch_model(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_int8_errs_less_than_float8_itself(weights: str) -> None:
    """Its error comes on top of the one that stock's float8 has against layers without float8."""
    stock, model = (converted(llama(weights)) for _ in range(2))
    patch_model(model, "int8")
    assert kept(model) <= SHARES[weights][1] * kept(stock)
    (_, expected), (_, found), (_, true) = (step(m, batch()) for m in (stock, model, llama(weights)))
    error = relative_error(expected, true)
    assert error > 0.02 and relative_error(found, expected) < error
    assert relative_error(found, true) < 1.1 * error


@pytest.mark.parametrize("head", [False, True])
def test_converted_after_patch_model(head: bool) -> None:
    stock, model = converted(llama(), head=head), converted(patch_model(llama()), head=head)
    (loss, expected), (ours, found) = step(stock, batch()), step(model, batch())
    assert torch.equal(ours, loss)
    assert_same(found, expected, "fp32")
    assert kept(model) <= 0.75 * kept(stock)
    unpatch_model(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]


def test_gradient_checkpointing() -> None:
    stock, model = converted(llama()), patch_model(converted(llama()))
    for one in (stock, model):
        one.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(step(model, batch())[1], step(stock, batch())[1], "fp32")
    assert kept(model) <= 0.85 * kept(stock)


@pytest.mark.slow
def test_compiled() -> None:
    stock, model = converted(llama()), patch_model(converted(llama()))
    compiled = torch.compile(model, backend="hf_actcompress")
    (loss, expected), (ours, found) = step(stock, batch()), step(compiled, batch())
    assert torch.allclose(ours, loss, rtol=1e-6)
    assert_same({name.removeprefix("_orig_mod."): g for name, g in found.items()}, expected, "fp32")
    assert kept(compiled) <= 0.5 * kept(stock)


def test_the_report_says_what_is_left_alone() -> None:
    said = str(patch_report(patch_model(converted(llama()))))
    assert "14 linear: Float8Linear is a subclass of nn.Linear with a forward of its own" in said
    assert "2 gated_mlp" in said and "5 norm" in said and "1 loss_head" in said
