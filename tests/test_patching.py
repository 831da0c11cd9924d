"""patch_model, unpatch_model, patched, patch_report: what they do to a model and what they leave as it was."""

from __future__ import annotations

import copy
import inspect
import io
import json
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_actcompress import CompressionConfig, patch_model, patch_report, patched, patching, unpatch_model
from hf_actcompress.errors import NothingPatchedError, NotPatchedError, UnknownOptionError
from hf_actcompress.modules.base import PatchedModule
from tests.families import BODY, BY_NAME, FAMILIES, Batch, Family, differing, step

BERT, GPT2, LLAMA = BY_NAME["bert"], BY_NAME["gpt2-gelu-tanh"], BY_NAME["llama"]
three = pytest.mark.parametrize("family", [BERT, GPT2, LLAMA], ids=lambda f: f.name)
BF16 = torch.bfloat16
# a second config that changes no module's class, only what it was told
OTHER = CompressionConfig(loss_head=False, logits=False)


def _types(model: nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}


def _is_patched(model: nn.Module) -> bool:
    return any(isinstance(m, PatchedModule) for m in model.modules())


def _assert_trains_like(model: Any, reference: Any, batch: Batch) -> None:
    loss, grads = step(model, batch)
    stock_loss, stock = step(reference, batch)
    assert torch.equal(loss, stock_loss)
    assert not differing(grads, stock)


@three
def test_in_place_and_returned(family: Family) -> None:
    model = family.build()
    parts = {name: id(module) for name, module in model.named_modules()}
    cls = type(model)
    assert patch_model(model, BODY) is model
    assert type(model) is cls
    assert {name: id(module) for name, module in model.named_modules()} == parts
    assert _is_patched(model)


@three
def test_patching_twice_changes_nothing(family: Family) -> None:
    model = patch_model(family.build(BF16), BODY)
    types, report = _types(model), patch_report(model)
    assert _types(patch_model(model, BODY)) == types
    assert patch_report(model) == report
    _assert_trains_like(model, family.build(BF16), family.make_batch("right"))


@three
def test_another_config_starts_again_from_stock(family: Family) -> None:
    model = patch_model(family.build(BF16), BODY)
    stock = _types(family.build())
    patch_model(model, OTHER)
    fresh = patch_model(family.build(BF16), OTHER)
    assert patch_report(model) == patch_report(fresh)
    for name, module in model.named_modules():
        assert (module.stock_class if isinstance(module, PatchedModule) else type(module)) is stock[name]
    _assert_trains_like(model, family.build(BF16), family.make_batch("right"))


@three
def test_unpatch_restores_classes_and_training(family: Family) -> None:
    model, stock = family.build(BF16, dropout=0.1), family.build(BF16, dropout=0.1)
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    step(patch_model(model, BODY), family.make_batch("right"))
    assert unpatch_model(model) is model
    assert _types(model) == _types(stock)
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes
    _assert_trains_like(model, stock, family.make_batch("right"))
    with pytest.raises(NotPatchedError):
        patch_report(model)
    assert unpatch_model(model) is model


@three
def test_a_second_model_is_untouched(family: Family) -> None:
    model, second = family.build(), family.build()
    types = _types(second)
    patch_model(model, BODY)
    assert _types(second) == types and not _is_patched(second)
    assert second.config._attn_implementation == "sdpa" == model.config._attn_implementation
    assert "forward" not in second.__dict__


@three
def test_patched_is_undone(family: Family) -> None:
    model = family.build()
    types = _types(model)
    with patched(model, BODY) as inside:
        assert inside is model and _is_patched(model)
    assert _types(model) == types
    with pytest.raises(ZeroDivisionError), patched(model, BODY):
        raise ZeroDivisionError
    assert _types(model) == types
    with pytest.raises(UnknownOptionError), patched(model, "int3"):
        raise AssertionError("not reached")
    assert _types(model) == types


def test_patched_gives_back_the_config_of_before() -> None:
    model = patch_model(LLAMA.build(), BODY)
    before = patch_report(model)
    with patched(model, OTHER):
        pass
    assert patch_report(model) == before


@three
def test_an_unknown_preset_leaves_a_patched_model_alone(family: Family) -> None:
    model = patch_model(family.build(), BODY)
    types = _types(model)
    with pytest.raises(UnknownOptionError):
        patch_model(model, "int3")
    assert _types(model) == types


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_deepcopy_is_independent(family: Family) -> None:
    """The copy is patched, and its forward uses its own weights."""
    model = patch_model(family.build(BF16), BODY)
    clone = copy.deepcopy(model)
    assert _is_patched(clone)
    assert not {id(p) for p in clone.parameters()} & {id(p) for p in model.parameters()}
    batch = family.make_batch(family.paddings[-1])
    loss, grads = step(model, batch)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    clone_loss, clone_grads = step(clone, batch)
    assert torch.equal(clone_loss, loss) and not differing(clone_grads, grads)
    unpatch_model(model)
    assert _is_patched(clone) and patch_report(clone).patched
    assert _types(unpatch_model(clone)) == _types(model)


@three
def test_pickle_and_torch_save(family: Family) -> None:
    model = patch_model(family.build(BF16), BODY)
    batch = family.make_batch("right")
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    for clone in copies:
        assert _types(clone) == _types(model)
        assert patch_report(clone) == patch_report(model)
        _assert_trains_like(clone, family.build(BF16), batch)


@three
def test_tied_weights_stay_tied(family: Family) -> None:
    model = family.build(tie_word_embeddings=True)
    patch_model(model, BODY)
    tied = model.get_output_embeddings().weight
    assert tied is model.get_input_embeddings().weight
    assert copy.deepcopy(model).get_output_embeddings().weight is not tied
    clone = copy.deepcopy(model)
    assert clone.get_output_embeddings().weight is clone.get_input_embeddings().weight
    model.tie_weights()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    reference = family.build(tie_word_embeddings=True)
    loss, grads = step(model, family.make_batch("right"))
    stock_loss, stock = step(reference, family.make_batch("right"))
    assert torch.equal(loss, stock_loss) and grads.keys() == stock.keys()


@three
def test_resized_embeddings(family: Family) -> None:
    """resize_token_embeddings makes a new head: stock until the next patch_model, and training is right either way."""
    model, stock = patch_model(family.build(BF16), BODY), family.build(BF16)
    for m in (model, stock):
        torch.manual_seed(4)
        m.resize_token_embeddings(80)
    batch = family.make_batch("right")
    _assert_trains_like(model, stock, batch)
    patch_model(model, BODY)
    assert isinstance(model.get_output_embeddings(), PatchedModule)
    _assert_trains_like(model, stock, batch)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_signature_is_stock(family: Family) -> None:
    """Trainer drops the dataset's columns that are not in it."""
    model = family.build()
    before = inspect.signature(model.forward)
    assert inspect.signature(patch_model(model, BODY).forward) == before
    assert inspect.signature(copy.deepcopy(model).forward) == before
    assert inspect.signature(unpatch_model(model).forward) == before


def test_repr_shows_patched_layers() -> None:
    text = repr(patch_model(LLAMA.build(), BODY))
    for name in ("ActCompressLinear", "ActCompressLlamaRMSNorm", "ActCompressLlamaMLP", "ActCompressLlamaAttention"):
        assert name in text
    assert "ActCompress" not in repr(unpatch_model(patch_model(LLAMA.build(), BODY)))


def test_isinstance_still_holds() -> None:
    """Weight-decay groups, PEFT and output capture ask by isinstance."""
    stock = GPT2.build()
    model = patch_model(GPT2.build(), BODY)
    for (_, a), (_, b) in zip(stock.named_modules(), model.named_modules(), strict=True):
        assert isinstance(b, type(a))


def test_report_prints_and_serialises(capsys: pytest.CaptureFixture[str]) -> None:
    model = patch_model(BERT.build(), BODY)
    report = patch_report(model)
    rows = json.loads(report.to_json())
    assert len(rows) == len(report.rows) == len(report.patched) + len(report.left_alone)
    assert rows[0].keys() == {"name", "module", "role", "variant", "codec", "keeps", "reason", "note"}
    assert "embedding: keeps only its indices" in str(report)
    report.print()
    assert "ActCompress" not in capsys.readouterr().out


@three
def test_moving_and_casting_a_patched_model(family: Family) -> None:
    """Nothing about dtypes was cached when the model was patched."""
    model = patch_model(family.build(), BODY).to(BF16)
    _assert_trains_like(model, family.build().to(BF16), family.make_batch("right"))


@three
def test_hooks_still_fire(family: Family) -> None:
    """Hooks on every leaf, put on before or after patching, see what they see in stock, and nothing of our probes."""
    fired = []
    for ours in (False, True):
        model, calls = family.build(dropout=0.1), Counter[str]()
        for when in ("before", "after"):
            for name, module in model.named_modules():
                if not list(module.children()):
                    _count_calls(module, calls, f"{when} {name}")
            if ours and when == "before":
                patch_model(model, BODY)
        loss, grads = step(model, family.make_batch("right"))
        fired.append((calls, loss, grads))
    assert fired[0][0] == fired[1][0] and len(fired[0][0]) > 50
    assert torch.equal(fired[0][1], fired[1][1])


def _count_calls(module: nn.Module, calls: Counter[str], name: str) -> None:
    module.register_forward_pre_hook(lambda *_: calls.update([f"{name} pre"]))
    module.register_forward_hook(lambda *_: calls.update([f"{name} forward"]))
    module.register_full_backward_hook(lambda *_: calls.update([f"{name} backward"]))


def test_strict_and_nothing_to_patch() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Flatten())
    with pytest.raises(NothingPatchedError, match=r"(?s)Sequential.*strict=False"):
        patch_model(model, BODY)
    assert patch_model(model, strict=False) is model
    assert [row.role for row in patch_report(model).rows] == ["embedding"]


def test_a_plain_module_is_patched_too() -> None:
    """Leaf types need no transformers model around them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    stock = copy.deepcopy(model)
    x = torch.randn(5, 8)
    patch_model(model, BODY)(x).sum().backward()
    stock(x).sum().backward()
    for p, q in zip(model.parameters(), stock.parameters(), strict=True):
        assert isinstance(p.grad, Tensor) and torch.equal(p.grad, q.grad)


@three
def test_an_exception_in_a_forward_leaves_nothing_behind(family: Family) -> None:
    model = patch_model(family.build(BF16), BODY)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    handle = list(model.modules())[-1].register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        step(model, family.make_batch("right"))
    handle.remove()
    _assert_trains_like(model, family.build(BF16), family.make_batch("right"))


@three
def test_another_default_device_changes_nothing(family: Family) -> None:
    """The probes run where they say; a device that computes nothing would show any that does not."""
    expected = patch_report(patch_model(family.build()))
    model = family.build()
    try:
        torch.set_default_device("meta")
        patch_model(model)
    finally:
        torch.set_default_device(None)
    assert patch_report(model) == expected


def test_an_error_in_the_middle_leaves_the_stock_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BERT.build()
    classes = [type(m) for m in model.modules()]
    find, calls = patching.find_site, []

    def failing(module: nn.Module, config: CompressionConfig) -> object:
        calls.append(module)
        if len(calls) > 10:
            raise RuntimeError("out of luck")
        return find(module, config)

    monkeypatch.setattr(patching, "find_site", failing)
    with pytest.raises(RuntimeError, match="out of luck"):
        patch_model(model)
    assert [type(m) for m in model.modules()] == classes and "forward" not in model.__dict__
