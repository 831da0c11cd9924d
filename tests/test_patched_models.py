"""A patched model can be copied, pickled, tied, resized, moved, hooked and inspected like a stock one."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections import Counter

import pytest
import torch
from torch import nn

from hf_actcompress import patch_model, patch_report, unpatch_model
from hf_actcompress.modules.base import PatchedModule
from tests.families import BODY, FAMILIES, Family, differing, step
from tests.patching_checks import BF16, GPT2, LLAMA, assert_trains_like, is_patched, three, types_of


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_deepcopy_is_independent(family: Family) -> None:
    """The copy is patched, and its forward uses its own weights."""
    model = patch_model(family.build(BF16), BODY)
    clone = copy.deepcopy(model)
    assert is_patched(clone)
    assert not {id(p) for p in clone.parameters()} & {id(p) for p in model.parameters()}
    batch = family.make_batch(family.paddings[-1])
    loss, grads = step(model, batch)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    clone_loss, clone_grads = step(clone, batch)
    assert torch.equal(clone_loss, loss) and not differing(clone_grads, grads)
    unpatch_model(model)
    assert is_patched(clone) and patch_report(clone).patched
    assert types_of(unpatch_model(clone)) == types_of(model)


@three
def test_pickle_and_torch_save(family: Family) -> None:
    model = patch_model(family.build(BF16), BODY)
    batch = family.make_batch("right")
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    for clone in copies:
        assert types_of(clone) == types_of(model)
        assert patch_report(clone) == patch_report(model)
        assert_trains_like(clone, family.build(BF16), batch)


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
    """resize_token_embeddings makes a new head, which is stock until the next patch_model. Both train like stock."""
    model, stock = patch_model(family.build(BF16), BODY), family.build(BF16)
    for m in (model, stock):
        torch.manual_seed(4)
        m.resize_token_embeddings(80)
    batch = family.make_batch("right")
    assert_trains_like(model, stock, batch)
    patch_model(model, BODY)
    assert isinstance(model.get_output_embeddings(), PatchedModule)
    assert_trains_like(model, stock, batch)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_signature_is_stock(family: Family) -> None:
    """Trainer drops the columns of a dataset that are not in the signature of forward."""
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
    """Weight-decay groups, PEFT and the capture of outputs use isinstance to find modules."""
    stock = GPT2.build()
    model = patch_model(GPT2.build(), BODY)
    for (_, a), (_, b) in zip(stock.named_modules(), model.named_modules(), strict=True):
        assert isinstance(b, type(a))


@three
def test_moving_and_casting_a_patched_model(family: Family) -> None:
    """A patched model can be cast, so patching must not store any dtype."""
    model = patch_model(family.build(), BODY).to(BF16)
    assert_trains_like(model, family.build().to(BF16), family.make_batch("right"))


@three
def test_hooks_still_fire(family: Family) -> None:
    """Hooks on leaves are called as often as in stock, whether they were added before or after patching.

    The probes that patch_model runs must not call them.
    """
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
