"""Rotary embeddings of whole models: bits are stock's, and only Llama's function in the patched model is replaced."""

from __future__ import annotations

import copy
import inspect
import io
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers.models.llama import modeling_llama

from hf_actcompress import CompressionConfig, ops, patch_model, patch_report, unpatch_model
from hf_actcompress.models import rope
from tests.families import BODY as EXACT_BODY
from tests.families import BY_NAME, MODES, build, differing, mode_of, step

# plans do not call this op
BODY = replace(EXACT_BODY, plans=False)
LLAMAS = ("llama", "mistral", "qwen2", "qwen3", "gemma")
TEMPO = CompressionConfig(attention_variant="tempo", loss_head=False)
LAYERS = 2
Calls = list[tuple[int, ...]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The shapes of the queries that our op was called with."""
    seen: Calls = []
    function = ops.rope

    def counted(q: Tensor, *args: Any) -> Any:
        seen.append(tuple(q.shape))
        return function(q, *args)

    monkeypatch.setattr(ops, "rope", counted)
    return seen


def stock_rope(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes patched models use stock's rotary embeddings."""
    monkeypatch.setattr(rope.GlobalsCopy, "is_of", lambda self, stock_class: False)


def same_without(monkeypatch: pytest.MonkeyPatch, model: Any, batch: dict[str, Any], mode: str = "fp32") -> None:
    """Loss and gradients of a patched model are those that it has with stock's rotary embeddings."""
    loss, grads = step(model, batch, mode)
    with monkeypatch.context() as patch:
        stock_rope(patch)
        expected, stock = step(model, batch, mode)
    assert torch.equal(loss, expected) and grads and not differing(grads, stock)


def attentions(model: Any) -> list[Any]:
    return [m for m in model.modules() if getattr(getattr(m, "actcompress", None), "role", "") == "attention"]


@pytest.mark.parametrize("name", LLAMAS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding", ["none", "right"])
def test_loss_and_gradients(name: str, mode: str, padding: str, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are bit-equal to those with stock's rotary embeddings.

    In fp32 a patched model differs from stock, but only because of its norms.
    """
    model, batch = build(BY_NAME[name], mode), BY_NAME[name].make_batch(padding)
    stock_loss, stock = step(model, batch, mode)
    same_without(monkeypatch, patch_model(model, BODY), batch, mode)
    assert len(calls) == LAYERS
    loss, grads = step(model, batch, mode)
    assert torch.equal(loss, stock_loss)
    assert mode != "bf16" or not differing(grads, stock)


def test_attention_alone_in_fp32(calls: Calls) -> None:
    """Only the rotary embedding of this attention is patched. Its output and gradients are bit-equal to stock's."""
    model = BY_NAME["llama"].build()
    x, positions = torch.randn(2, 13, 32), torch.arange(13)[None]
    angles = model.model.rotary_emb(x, positions)
    results = []
    for patched in (False, True):
        layer = (patch_model(model, BODY) if patched else model).model.layers[0].self_attn
        for child in layer.children():
            unpatch_model(child)
        leaf = x.clone().requires_grad_()
        y, _ = layer(leaf, position_embeddings=angles, attention_mask=None)
        grads = torch.autograd.grad(y.square().sum(), [leaf, *layer.parameters()])
        results.append([y.detach(), *grads])
    assert len(calls) == 1 and all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("name", "why"), [("phi3", "numeric probe"), ("modernbert", "numeric probe"), ("bert", ""), ("t5", "")]
)
def test_others_keep_theirs_and_the_report_says_why(name: str, why: str, calls: Calls) -> None:
    model = patch_model(BY_NAME[name].build())
    step(model, BY_NAME[name].make_batch())
    assert not calls
    notes = {row.note for row in patch_report(model).patched if row.role == "attention"}
    assert len(notes) == 1 and (why in notes.pop())
    assert ("rotary embeddings are stock's" in str(patch_report(model))) is bool(why)
    assert not any("forward" in vars(type(m)) for m in attentions(model))


def test_report_of_those_that_are_ours() -> None:
    rows = [row for row in patch_report(patch_model(BY_NAME["llama"].build())).patched if row.role == "attention"]
    assert len(rows) == LAYERS and all(not row.note for row in rows)


@pytest.mark.parametrize(
    ("file", "attention"),
    [
        ("cohere", "CohereAttention"),
        ("glm", "GlmAttention"),
        ("olmo2", "Olmo2Attention"),
        ("gpt_neox", "GPTNeoXAttention"),
    ],
)
def test_interleaved_partial_and_otherwise_rounded(file: str, attention: str) -> None:
    kind = getattr(import_module(f"transformers.models.{file}.modeling_{file}"), attention)
    assert rope.calls_rope(kind) and "numeric probe" in str(rope.why_stock(kind))


def with_name(forward: Any, **names: Any) -> type:
    """A class with this forward, but with other values for some of its globals."""
    inner = inspect.unwrap(forward)
    copied = types.FunctionType(inner.__code__, {**inner.__globals__, **names}, "forward")
    return type("Attention", (torch.nn.Module,), {"forward": copied})


def close(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Correct except for the dtype in which it rounds."""
    wide = modeling_llama.apply_rotary_pos_emb(q.float(), k.float(), cos, sin, unsqueeze_dim)
    return wide[0].to(q.dtype), wide[1].to(k.dtype)


def other_order(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    q, k = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)
    return q.contiguous(), k.contiguous()


def broken(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    raise RuntimeError("needs a GPU")


def other_signature(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)


@pytest.mark.parametrize("function", [close, other_order, broken, other_signature, print])
def test_other_functions_of_that_name(function: Any) -> None:
    stock = modeling_llama.LlamaAttention.forward
    assert rope.why_stock(with_name(stock)) is None
    assert rope.why_stock(with_name(stock, apply_rotary_pos_emb=function))


def test_probe_is_the_same_wherever_a_file_is_loaded() -> None:
    probe, rotary = rope._is_rope.__wrapped__, modeling_llama.apply_rotary_pos_emb
    state = torch.get_rng_state()
    with torch.device("meta"):
        assert probe(rotary)
    with mode_of("autocast"), torch.inference_mode():
        assert probe(rotary)
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_global_changes_and_unpatching_restores() -> None:
    before = dict(vars(modeling_llama)), dict(vars(modeling_llama.LlamaAttention))
    model, other = BY_NAME["llama"].build(), BY_NAME["llama"].build()
    batch = BY_NAME["llama"].make_batch()
    expected = step(model, batch)
    step(patch_model(model, BODY), batch)
    assert (dict(vars(modeling_llama)), dict(vars(modeling_llama.LlamaAttention))) == before
    assert all(type(layer.self_attn) is modeling_llama.LlamaAttention for layer in other.model.layers)
    for m in (other, unpatch_model(model)):
        loss, grads = step(m, batch)
        assert torch.equal(loss, expected[0]) and not differing(grads, expected[1])
    assert all(type(layer.self_attn) is modeling_llama.LlamaAttention for layer in model.model.layers)


def test_the_copy_is_made_once() -> None:
    first, second = (patch_model(BY_NAME["llama"].build()) for _ in range(2))
    assert len({vars(type(m))["forward"] for model in (first, second) for m in attentions(model)}) == 1


def copies(model: Any) -> Iterator[Any]:
    yield copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    yield torch.load(file, weights_only=False)


def test_copies_and_files(calls: Calls) -> None:
    model, batch = patch_model(BY_NAME["llama"].build(), BODY), BY_NAME["llama"].make_batch()
    loss, grads = step(model, batch)
    for other in copies(model):
        calls.clear()
        other_loss, other_grads = step(other, batch)
        assert torch.equal(other_loss, loss) and not differing(other_grads, grads) and len(calls) == LAYERS


def test_stock_runs_where_nothing_is_kept(calls: Calls) -> None:
    model, batch = patch_model(BY_NAME["llama"].build(), BODY), BY_NAME["llama"].make_batch()
    with torch.no_grad():
        model(**batch)
    with torch.inference_mode():
        model.eval()(**batch)
    model.generate(batch["input_ids"], max_new_tokens=3, pad_token_id=0)
    torch._dynamo.reset()
    torch.compile(model.train(), backend="aot_eager")(**batch).loss.backward()
    assert not calls
    model.eval()(**batch).loss.backward()
    assert len(calls) == LAYERS


def test_angles_that_are_learned(calls: Calls) -> None:
    layer = patch_model(BY_NAME["llama"].build(), BODY).model.layers[0].self_attn
    angles = [torch.randn(1, 5, 8, requires_grad=True) for _ in range(2)]
    y, _ = layer(torch.randn(2, 5, 32), position_embeddings=tuple(angles), attention_mask=None)
    y.sum().backward()
    assert not calls and all(a.grad is not None and a.grad.any() for a in angles)


@contextmanager
def exchanged(name: str, value: Any, home: Any = modeling_llama) -> Iterator[None]:
    before = getattr(home, name)
    setattr(home, name, value)
    try:
        yield
    finally:
        setattr(home, name, before)


@pytest.mark.parametrize("config", [BODY, EXACT_BODY], ids=["leaf by leaf", "plans"])
def test_what_others_put_in_its_place_later_runs(calls: Calls, config: CompressionConfig) -> None:
    model, batch = patch_model(BY_NAME["llama"].build(), config), BY_NAME["llama"].make_batch()
    calls.clear()
    with exchanged("apply_rotary_pos_emb", broken), pytest.raises(RuntimeError, match="needs a GPU"):
        step(model, batch)
    with exchanged("forward", print, modeling_llama.LlamaAttention), pytest.raises(TypeError):
        step(model, batch)
    assert not calls
    step(model, batch)
    assert len(calls) == (0 if config.plans else LAYERS)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool, calls: Calls) -> None:
    model, batch = build(BY_NAME["llama"], "bf16"), BY_NAME["llama"].make_batch("right")
    _, stock = step(model, batch)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    _, ours = step(patch_model(model, BODY), batch)
    assert not differing(ours, stock)
    # layers run again in backward; the first run of a reentrant region has no gradients, and stock's function
    assert len(calls) == LAYERS * (1 if reentrant else 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("target", ["q_proj", "k_proj", "v_proj"])
def test_lora_on_one_projection(target: str, mode: str, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    model = get_peft_model(build(BY_NAME["llama"], mode), LoraConfig(r=2, target_modules=[target]))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p)
    same_without(monkeypatch, patch_model(model, BODY), BY_NAME["llama"].make_batch("left"), mode)
    # with an adapter on v alone, q and k of the first layer need no gradient
    assert len(calls) == (LAYERS - 1 if target == "v_proj" else LAYERS)


def test_eager_attention(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = BY_NAME["llama"].make_batch("right")
    model = BY_NAME["llama"].build(torch.bfloat16, attn_implementation="eager")
    step(patch_model(model, BODY), batch)
    assert not calls
    same_without(monkeypatch, patch_model(model, TEMPO), batch)
    assert len(calls) == LAYERS


def test_outputs_under_autocast_without_gradients() -> None:
    model, batch = BY_NAME["llama"].build().eval(), BY_NAME["llama"].make_batch()
    with torch.no_grad(), mode_of("autocast"):
        stock = model(**batch).logits
        assert torch.equal(patch_model(model, BODY)(**batch).logits, stock)
