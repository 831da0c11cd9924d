"""Layers that run as programs: bits are those of the leaf path, and no more bytes are kept."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_actcompress import patch_model, unpatch_model
from hf_actcompress.memory.measurement.allocator import kept_bytes
from hf_actcompress.programs import stages, whole
from hf_actcompress.records import live_entries
from hf_actcompress.reference import attention, dense_attention
from tests.families import BY_NAME, cast_batch, step
from tests.programs.pairs import DTYPES, MODES, PROGRAMS, assert_same, calls, every_family, pair


@pytest.mark.daily(3)
@every_family
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding", ("none", "right", "left"))
def test_the_same_bits(name: str, mode: str, padding: str) -> None:
    if padding not in BY_NAME[name].paddings:
        pytest.skip(f"{name} takes no padding")
    leaves, programs = pair(name, DTYPES[mode])
    assert_same(programs, leaves, BY_NAME[name].make_batch(padding), mode)
    assert calls(programs) == [1, 1] and live_entries() == 0


@every_family
def test_stocks_loss(name: str) -> None:
    stock = BY_NAME[name].build()
    batch = BY_NAME[name].make_batch(BY_NAME[name].paddings[-1])
    loss = step(stock, batch)[0]
    assert torch.equal(step(patch_model(stock, PROGRAMS), batch)[0], loss)


@every_family
def test_the_same_bytes(name: str) -> None:
    batch = BY_NAME[name].make_batch("none")
    batch = cast_batch(batch, torch.bfloat16)
    models = pair(name, torch.bfloat16)
    kept = [kept_bytes(lambda model=model: model(**batch), "cpu") for model in models]  # type: ignore[misc]
    assert kept[1] <= kept[0]


def test_one_function_a_layer() -> None:
    _, programs = pair("llama")
    names: list[str] = []
    pending, seen = [programs(**BY_NAME["llama"].make_batch()).loss.grad_fn], set[Any]()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.append(type(node).__name__)
            pending += [parent for parent, _ in node.next_functions]
    assert names.count("ProgramFunctionBackward") == len(programs.model.layers)
    # the layers leave no other node; the last norm belongs to no layer
    assert names.count("RMSNormFunctionBackward") == 1 and names.count("LinearFunctionBackward") == 0


FROZEN: dict[str, Callable[[str], bool]] = {
    "all but the norms": lambda name: "norm" not in name,
    "the norms": lambda name: "norm" in name,
    "the attention": lambda name: "self_attn" in name,
    "the MLP": lambda name: "mlp" in name,
    "one projection": lambda name: "k_proj" in name or "up_proj" in name,
    "the first layer": lambda name: "layers.0" in name or "embed" in name,
    "everything but one weight": lambda name: "layers.1.mlp.gate_proj" not in name,
}


@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_weights(frozen: str) -> None:
    models = pair("qwen3")
    for model in models:
        for name, p in model.named_parameters():
            p.requires_grad_(not FROZEN[frozen](name))
    assert_same(models[1], models[0], BY_NAME["qwen3"].make_batch("right"))
    batch = BY_NAME["qwen3"].make_batch()
    kept = [kept_bytes(lambda model=model: model(**batch), "cpu") for model in models]  # type: ignore[misc]
    assert kept[1] <= kept[0]


def test_backward_twice_and_accumulation() -> None:
    leaves, programs = pair("llama")
    batch = BY_NAME["llama"].make_batch()
    grads = []
    for model in (leaves, programs):
        loss = model(**batch).loss
        loss.backward(retain_graph=True)
        loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *grads))


def test_other_data_before_backward_and_writes() -> None:
    leaves, programs = pair("llama")
    batch = BY_NAME["llama"].make_batch()
    grads = []
    for model in (leaves, programs):
        loss = model(**batch).loss
        for p in model.parameters():
            p.data = torch.zeros_like(p)
        loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *grads))
    loss = programs(**batch).loss
    with torch.no_grad():
        programs.model.layers[0].mlp.gate_proj.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("staged", (False, True))
@pytest.mark.parametrize("checkpointed", (False, True))
def test_no_second_derivatives_in_silence(checkpointed: bool, staged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test asks only for gradients of layers' weights, because the head's would raise the error in any case."""
    _, programs = pair("llama")
    if checkpointed:
        programs.gradient_checkpointing_enable({"use_reentrant": False})
    batch, layers = BY_NAME["llama"].make_batch(), programs.model.layers
    if staged:
        monkeypatch.setattr(stages, "SLACK", 0)
        programs(**batch).loss.backward()
    for layer in layers:
        grads = torch.autograd.grad(programs(**batch).loss, list(layer.parameters()), create_graph=True)
        for gradient in grads:
            with pytest.raises(RuntimeError, match="second derivatives"):
                gradient.sum().backward(retain_graph=True)
    assert calls(programs) == [2 + staged] * 2


@pytest.mark.parametrize("reentrant", (False, True))
def test_under_checkpointing(reentrant: bool) -> None:
    leaves, programs = pair("llama")
    for model in (leaves, programs):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    assert_same(programs, leaves, BY_NAME["llama"].make_batch("right"))
    assert min(calls(programs)) > 0


def test_a_cache_that_is_empty() -> None:
    leaves, programs = pair("llama")
    batch = BY_NAME["llama"].make_batch("right")
    losses = [model(**batch, use_cache=True).loss for model in (leaves, programs)]
    assert torch.equal(*losses) and calls(programs) == [1, 1]


def test_copies_files_and_unpatching() -> None:
    leaves, programs = pair("llama")
    batch = BY_NAME["llama"].make_batch()
    file = io.BytesIO()
    torch.save(programs, file)
    file.seek(0)
    for other in (copy.deepcopy(programs), torch.load(file, weights_only=False)):
        before = calls(other)[0]
        assert_same(other, leaves, batch)
        assert calls(other)[0] == before + 1
        inner = other.model.layers[0].actcompress.programs.codes[torch.float32, None].attentions
        assert other.model.layers[0].self_attn in inner
    assert calls(programs) == [0, 0]
    stock = BY_NAME["llama"].build()
    assert [type(m) for m in unpatch_model(programs).modules()] == [type(m) for m in stock.modules()]


@every_family
def test_attention_dropout(name: str) -> None:
    leaves, programs = pair(name, dropout=0.1)
    batch = BY_NAME[name].make_batch(BY_NAME[name].paddings[-1])
    results = []
    for model in (leaves, programs):
        torch.manual_seed(5)
        results.append(step(model, batch))
    (loss, grads), (expected, wanted) = results
    assert torch.equal(loss, expected) and all(torch.equal(grads[name], x) for name, x in wanted.items())
    assert calls(programs) == [1, 1]


@pytest.mark.parametrize("dropout", (0.0, 0.1))
def test_patching_draws_no_random_number_and_asks_once(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_actcompress.programs import proof

    model = BY_NAME["llama"].build(dropout=dropout)
    monkeypatch.setattr(proof, "_answers", {})
    torch.manual_seed(3)
    before = torch.get_rng_state()
    patch_model(model, PROGRAMS)
    assert torch.equal(torch.get_rng_state(), before)
    monkeypatch.setattr(proof, "_difference", lambda *_: pytest.fail("asked again"))
    patch_model(BY_NAME["llama"].build(dropout=dropout), PROGRAMS)


def test_layers_of_another_dtype_have_a_program_of_their_own() -> None:
    """Its dtype decides which kernel runs, and what its mask is turned into."""
    for dtype in (torch.bfloat16, torch.float32):
        settings: Any = pair("llama", dtype)[1].model.layers[0].actcompress
        assert [code.whole.dtype for code in settings.programs.codes.values()] == [dtype]


class EfficientOnACPU:
    """torch's CPU kernel under the name of CUDA's "efficient" one."""

    @staticmethod
    def _scaled_dot_product_efficient_attention(
        q: Any, k: Any, v: Any, bias: Any, _: bool, dropout: float, causal: bool, scale: float | None
    ) -> tuple[Any, ...]:
        return (*attention.attention_fwd(q, k, v, bias, causal, scale), q.new_empty(0), q.new_empty(0))

    @staticmethod
    def _scaled_dot_product_efficient_attention_backward(
        dout: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, lse: Any, *args: Any, scale: float | None
    ) -> tuple[Any, ...]:
        return (*attention.attention_bwd(dout, q, k, v, out, lse, bias, args[-1], scale), None)


def test_layers_share_the_additive_mask_of_cudas_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, programs = pair("llama")
    batch = BY_NAME["llama"].make_batch("right")
    expected = step(leaves, batch)
    # the programs are proved before the kernel is replaced
    step(programs, batch)
    made: list[torch.dtype] = []
    additive = dense_attention.additive
    monkeypatch.setattr(
        dense_attention, "additive", lambda mask, dtype: made.append(mask.dtype) or additive(mask, dtype)
    )
    monkeypatch.setattr(dense_attention, "aten", EfficientOnACPU)
    monkeypatch.setattr(whole, "fused_kernel", lambda *_: "efficient")
    loss, grads = step(programs, batch)
    assert torch.equal(loss, expected[0]) and calls(programs) == [2, 2]
    assert all(torch.equal(grads[name], x) for name, x in expected[1].items())
    assert made.count(torch.bool) == 1 and len(made) > 1
