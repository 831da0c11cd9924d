"""patch_model, unpatch_model, patched and patch_report: what they change in a model, and what they must not change."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_actcompress import CompressionConfig, patch_model, patch_report, patched, patching, unpatch_model
from hf_actcompress.errors import NothingPatchedError, NotPatchedError, UnknownOptionError
from hf_actcompress.modules.base import PatchedModule
from tests.families import BODY, Family, step
from tests.patching_checks import BERT, BF16, LLAMA, assert_trains_like, is_patched, three, types_of

# a second config: modules have the same classes under it, but other settings
OTHER = CompressionConfig(loss_head=False, logits=False)


@three
def test_in_place_and_returned(family: Family) -> None:
    model = family.build()
    parts = {name: id(module) for name, module in model.named_modules()}
    cls = type(model)
    assert patch_model(model, BODY) is model
    assert type(model) is cls
    assert {name: id(module) for name, module in model.named_modules()} == parts
    assert is_patched(model)


@three
def test_patching_twice_changes_nothing(family: Family) -> None:
    model = patch_model(family.build(BF16), BODY)
    types, report = types_of(model), patch_report(model)
    assert types_of(patch_model(model, BODY)) == types
    assert patch_report(model) == report
    assert_trains_like(model, family.build(BF16), family.make_batch("right"))


@three
def test_another_config_starts_again_from_stock(family: Family) -> None:
    model = patch_model(family.build(BF16), BODY)
    stock = types_of(family.build())
    patch_model(model, OTHER)
    fresh = patch_model(family.build(BF16), OTHER)
    assert patch_report(model) == patch_report(fresh)
    for name, module in model.named_modules():
        assert (module.stock_class if isinstance(module, PatchedModule) else type(module)) is stock[name]
    assert_trains_like(model, family.build(BF16), family.make_batch("right"))


@three
def test_unpatch_restores_classes_and_training(family: Family) -> None:
    model, stock = family.build(BF16, dropout=0.1), family.build(BF16, dropout=0.1)
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    step(patch_model(model, BODY), family.make_batch("right"))
    assert unpatch_model(model) is model
    assert types_of(model) == types_of(stock)
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes
    assert_trains_like(model, stock, family.make_batch("right"))
    with pytest.raises(NotPatchedError):
        patch_report(model)
    assert unpatch_model(model) is model


@three
def test_a_second_model_is_untouched(family: Family) -> None:
    model, second = family.build(), family.build()
    types = types_of(second)
    patch_model(model, BODY)
    assert types_of(second) == types and not is_patched(second)
    assert second.config._attn_implementation == "sdpa" == model.config._attn_implementation
    assert "forward" not in second.__dict__


@three
def test_patched_is_undone(family: Family) -> None:
    model = family.build()
    types = types_of(model)
    with patched(model, BODY) as inside:
        assert inside is model and is_patched(model)
    assert types_of(model) == types
    with pytest.raises(ZeroDivisionError), patched(model, BODY):
        raise ZeroDivisionError
    assert types_of(model) == types
    with pytest.raises(UnknownOptionError), patched(model, "int3"):
        raise AssertionError("not reached")
    assert types_of(model) == types


def test_patched_gives_back_the_config_of_before() -> None:
    model = patch_model(LLAMA.build(), BODY)
    before = patch_report(model)
    with patched(model, OTHER):
        pass
    assert patch_report(model) == before


@three
def test_an_unknown_preset_leaves_a_patched_model_alone(family: Family) -> None:
    model = patch_model(family.build(), BODY)
    types = types_of(model)
    with pytest.raises(UnknownOptionError):
        patch_model(model, "int3")
    assert types_of(model) == types


def test_report_prints_and_serialises(capsys: pytest.CaptureFixture[str]) -> None:
    model = patch_model(BERT.build(), BODY)
    report = patch_report(model)
    rows = json.loads(report.to_json())["rows"]
    assert len(rows) == len(report.rows) == len(report.patched) + len(report.left_alone)
    assert rows[0].keys() == {"name", "module", "role", "kind", "codec", "keeps", "reason", "note"}
    assert "embedding: keeps only its indices" in str(report)
    report.print()
    assert "ActCompress" not in capsys.readouterr().out


def test_strict_and_nothing_to_patch() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Flatten())
    with pytest.raises(NothingPatchedError, match=r"(?s)Sequential.*strict=False"):
        patch_model(model, BODY)
    assert patch_model(model, strict=False) is model
    assert [row.role for row in patch_report(model).rows] == ["embedding"]


def test_a_plain_module_is_patched_too() -> None:
    """Known leaf modules are patched even if they are not part of a transformers model."""
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
    assert_trains_like(model, family.build(BF16), family.make_batch("right"))


@three
def test_another_default_device_changes_nothing(family: Family) -> None:
    """Probes run on the CPU, whatever torch's default device is. On "meta" a probe would see no values."""
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

    def failing(module: nn.Module, config: CompressionConfig, places: object) -> object:
        calls.append(module)
        if len(calls) > 10:
            raise RuntimeError("out of luck")
        return find(module, config, places)

    monkeypatch.setattr(patching, "find_site", failing)
    with pytest.raises(RuntimeError, match="out of luck"):
        patch_model(model)
    assert [type(m) for m in model.modules()] == classes and "forward" not in model.__dict__
