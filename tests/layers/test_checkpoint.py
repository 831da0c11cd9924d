"""Checkpointed layers as one Function: values are stock's, no unused product is computed, only the input is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from hf_actcompress import patch_model, unpatch_model
from hf_actcompress.memory.measurement.allocator import kept_bytes
from tests.families import BY_NAME, Batch, Gradients, cast_batch, mode_of, step
from tests.layers.plans import DTYPES, LEAVES, MODES, PLANS, calls, patched

FAMILIES = ("llama", "qwen3", "bert", "gpt2-gelu-new", "gpt2-gelu-tanh", "modernbert", "vit")
PLAIN = {"use_reentrant": False}


class Products(TorchDispatchMode):
    """Counts matrix products and attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.attentions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.products += name in ("mm", "addmm", "bmm")
        self.attentions += "flash_attention" in name
        return func(*args, **(kwargs or {}))


def checkpointed(name: str, config: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    model = patched(BY_NAME[name].build(dtype, **options).train(), config)
    model.gradient_checkpointing_enable(PLAIN)
    return model


def same(found: tuple[torch.Tensor, Gradients], expected: tuple[torch.Tensor, Gradients]) -> bool:
    return torch.equal(found[0], expected[0]) and all(torch.equal(found[1][n], x) for n, x in expected[1].items())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_the_same_bits_and_no_more_bytes(name: str, mode: str) -> None:
    family, dtype = BY_NAME[name], DTYPES[mode]
    batch, results, kept = family.make_batch(family.paddings[-1]), [], []
    for config in (None, LEAVES, PLANS):
        model = checkpointed(name, config, dtype)
        results.append(step(model, batch, mode))
        with mode_of(mode):
            kept.append(kept_bytes(lambda model=model: model(**cast_batch(batch, dtype)), "cpu"))  # type: ignore[misc]
    assert set(calls(model)) == {2}
    assert same(results[2], results[0])
    assert kept[2] <= kept[1]


def counted(model: Any, batch: Batch) -> Products:
    loss = model(**batch).loss
    with Products() as counter:
        loss.backward()
    return counter


def test_no_product_that_nobody_reads() -> None:
    """A Llama layer's backward runs 6 products again and 14 of its own, attention again, and attention's backward."""
    batch, counts = BY_NAME["llama"].make_batch(), []
    for layers in (2, 4):
        model = checkpointed("llama", PLANS, num_hidden_layers=layers)
        counts.append(counted(model, batch))
    assert (counts[1].products - counts[0].products) / 2 == 6 + 14
    assert (counts[1].attentions - counts[0].attentions) / 2 == 2


def test_dropout_is_drawn_again_as_it_was() -> None:
    """The draws of the forward are stock's, and the second run leaves the generator alone."""
    batch, results, states = BY_NAME["bert"].make_batch(), [], []
    for config in (None, PLANS):
        model = checkpointed("bert", config, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.0)
        results.append(step(model, batch))
        states.append(torch.get_rng_state())
    assert set(calls(model)) == {1} and same(results[1], results[0]) and torch.equal(*states)


def test_a_second_backward_and_one_inside_of_autocast() -> None:
    model, batch = checkpointed("llama", PLANS), BY_NAME["llama"].make_batch("right")
    expected = step(model, batch)[1]
    loss = model(**batch).loss
    for _ in range(2):
        loss.backward(retain_graph=True)
        grads = {n: p.grad for n, p in model.named_parameters()}
        assert all(torch.equal(grads[n], x) for n, x in expected.items())  # type: ignore[arg-type]
        model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    layer = "model.layers.1.mlp.up_proj.weight"
    torch.testing.assert_close(model.get_parameter(layer).grad, expected[layer], rtol=0.1, atol=1e-3)


def test_other_checkpoints_are_as_somebody_has_set_them_up() -> None:
    """Reentrant checkpoints, and functions other than torch's own, get the layer as before."""
    batch = BY_NAME["llama"].make_batch()
    expected = step(checkpointed("llama", PLANS), batch)
    seen: list[int] = []

    def own(layer: Any, *args: Any) -> Any:
        seen.append(1)
        return checkpoint(layer, *args, use_reentrant=False)

    model = checkpointed("llama", PLANS)
    for layer in model.model.layers:
        layer._gradient_checkpointing_func = own
    assert same(step(model, batch), expected) and len(seen) == len(model.model.layers)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    assert same(step(model, batch), expected)


def test_without_gradients_nothing_is_kept() -> None:
    model, batch = checkpointed("llama", PLANS), BY_NAME["llama"].make_batch()
    with torch.no_grad():
        assert not model(**batch).loss.requires_grad
    assert set(calls(model)) == {0}


@pytest.mark.parametrize(
    ("config", "reentrant"), ((PLANS, True), (PLANS, False), (LEAVES, True)), ids=("reentrant", "plain", "leaves")
)
def test_a_layer_that_is_unpatched_before_its_backward(config: Any, reentrant: bool) -> None:
    """A reentrant checkpoint runs the forward of the class that the layer had."""
    batch, results = BY_NAME["llama"].make_batch(), []
    for is_patched in (False, True):
        model = BY_NAME["llama"].build(torch.float32).train()
        if is_patched:
            patch_model(model, config)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        loss = model(**batch).loss
        if is_patched:
            unpatch_model(model)
        loss.backward()
        results.append((loss.detach(), {n: p.grad for n, p in model.named_parameters()}))
    assert torch.equal(results[1][0], results[0][0])
    if config is LEAVES:
        torch.testing.assert_close(results[1][1], results[0][1])
    else:
        assert same(results[1], results[0])


@pytest.mark.parametrize("reentrant", (True, False), ids=("reentrant", "plain"))
@pytest.mark.parametrize("used", (True, False), ids=("in the loss", "unused"))
@pytest.mark.parametrize("asked", (("hidden_states",), ("attentions",), ("hidden_states", "attentions")), ids="+".join)
@pytest.mark.parametrize("name", ("bert", "vit"))
def test_captured_outputs(name: str, asked: tuple[str, ...], used: bool, reentrant: bool) -> None:
    """The second run captures nothing, but takes the forward's path. Capturing only hidden states stops no plan."""
    batch, results = BY_NAME[name].make_batch(), []
    for is_patched in (False, True):
        model = BY_NAME[name].build(attn_implementation="eager")
        # as an argument of the call it would also reach the layers, which then run module by module in backward anyway
        for kind in asked:
            setattr(model.config, f"output_{kind}", True)
        if is_patched:
            patch_model(model, PLANS)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        out = model(**batch)
        found = {kind: out[kind] for kind in asked}
        loss = out.loss + sum(x.square().mean() for kind in asked if used for x in out[kind])
        loss.backward()
        results.append((loss.detach(), {n: p.grad for n, p in model.named_parameters()}, found))
    for kind in asked:
        assert all(map(torch.equal, results[1][2][kind], results[0][2][kind]))
    if used and not reentrant and asked == ("hidden_states",):
        # the plan gives its input one gradient, where stock adds several to that of the hidden state
        torch.testing.assert_close(results[1][1], results[0][1])
    else:
        assert same(results[1][:2], results[0][:2])
    assert "attentions" in asked or set(calls(model)) == {1}


@pytest.mark.parametrize("plans", (True, False))
@pytest.mark.parametrize("name", ("bert", "gpt2-gelu-tanh", "llama"))
def test_hooks_removed_before_backward(name: str, plans: bool) -> None:
    """The second run takes the first run's path: of a layer, and of an MLP whose activation had a hook."""
    batch, results = BY_NAME[name].make_batch(), []
    for is_patched in (False, True):
        model = BY_NAME[name].build()
        if is_patched:
            patch_model(model, replace(PLANS, plans=plans))
        model.gradient_checkpointing_enable({"use_reentrant": False})
        inside = [
            module for name, module in model.named_modules() if name.endswith(("act_fn", ".act", "attention", "attn"))
        ]
        handles = [module.register_full_backward_hook(lambda *_: None) for module in inside]
        loss = model(**batch).loss
        assert handles
        for handle in handles:
            handle.remove()
        loss.backward()
        results.append((loss.detach(), {n: p.grad for n, p in model.named_parameters()}))
    torch.testing.assert_close(results[1], results[0])
