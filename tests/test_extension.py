"""Codecs, presets, rules and activations that other packages register: they work, are checked, and can be removed."""

from __future__ import annotations

import csv
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_actcompress import (
    PRESETS,
    ActCompressCallback,
    CompressionConfig,
    compare_presets,
    kept_bytes,
    patch_model,
    patch_report,
)  # fmt: skip
from hf_actcompress.codecs import Codec, IntGroup
from hf_actcompress.codecs.codec import TensorMeta, meta_of
from hf_actcompress.codecs.table import CODECS
from hf_actcompress.errors import CodecError, RegistrationError, RuleError, UnknownOptionError
from hf_actcompress.extension import register_activation, register_codec, register_preset, register_rule
from hf_actcompress.models.sites import Declined, Site
from hf_actcompress.modules.base import Settings
from hf_actcompress.roles import Role
from hf_actcompress.testing import check_codec
from tests.slopes import VOCAB, bert, llama


@dataclass(frozen=True)
class Half(Codec):
    """A codec of another package: it stores everything in bf16."""

    offset: float = 0.0

    def pack(self, x: Tensor) -> tuple[tuple[Tensor, ...], object]:
        meta = TensorMeta.of(x)
        return ((x + self.offset).to(torch.bfloat16),), meta

    def unpack(self, tensors: tuple[Tensor, ...], meta: object) -> Tensor:
        return (tensors[0].to(meta_of(meta).dtype) - self.offset).reshape(meta_of(meta).shape)

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return 2 * shape.numel()


def _kept(model: Any, config: Any) -> int:
    ids = torch.arange(64).view(2, 32)
    model.train()
    if config is not None:
        patch_model(model, config)
    return kept_bytes(lambda: model(input_ids=ids, labels=ids), "cpu")


def test_a_codec_and_a_preset() -> None:
    with register_codec("half", Half()), register_preset("mine", CompressionConfig(mlp="half", norm="half")):
        exact, half = (_kept(llama(2, hidden=64), preset) for preset in ("exact", "mine"))
        assert half < 0.9 * exact
        model = patch_model(llama(2, hidden=64), "mine")
        assert "half" in {row.codec for row in patch_report(model).patched}
        assert CompressionConfig.from_json(PRESETS["mine"].to_json()) == PRESETS["mine"]
    assert "half" not in CODECS and "mine" not in PRESETS
    with pytest.raises(UnknownOptionError, match="'half'"):
        CompressionConfig(mlp="half")


def test_a_codec_in_the_place_of_its_name() -> None:
    assert CompressionConfig(mlp=IntGroup(8)).mlp == "int8"
    config = CompressionConfig(mlp=Half(1.5))
    try:
        assert config.mlp == "Half(offset=1.5)" and CODECS[config.mlp] == Half(1.5)
        assert _kept(llama(2, hidden=64), config) < _kept(llama(2, hidden=64), "exact")
        assert not config.lossless
    finally:
        CODECS.pop(config.mlp)


def test_a_codec_of_one_layer_in_the_place_of_its_name() -> None:
    with register_codec("half", Half()):
        config = CompressionConfig(overrides=(("layers.1", "mlp", Half()), ("layers.0", "mlp", IntGroup(8))))  # type: ignore[arg-type]
        assert [codec for *_, codec in config.overrides] == ["half", "int8"]


def test_a_name_for_a_codec_that_a_config_has_had() -> None:
    """The first config is still valid, and the next one has the new name."""
    before = CompressionConfig(mlp=Half(2.5))
    try:
        with register_codec("half", Half(2.5)):
            assert CompressionConfig(mlp=Half(2.5)).mlp == "half"
            assert CompressionConfig.from_dict(before.to_dict()) == before
    finally:
        CODECS.pop(before.mlp)


class Naive:
    """It has the methods of a codec, but not the base class `Codec`."""

    pack, unpack, nbytes = Half.pack, Half.unpack, Half.nbytes


class Hashless(Half):
    __hash__ = None  # type: ignore[assignment]


class NoData(Half):
    """Its repr is that of a plain object, which contains an address."""

    __repr__ = object.__repr__


@dataclass(frozen=True)
class HalfOfRows(Half):
    takes_rows = True


def test_a_codec_of_rows_is_given_no_padding() -> None:
    ids = torch.arange(64).view(2, 32)
    mask = torch.ones_like(ids).index_fill(1, torch.arange(8, 32), 0)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask.bool(), torch.tensor(-100))}
    kept = []
    for codec in (Half(), HalfOfRows()):
        with register_codec("half", codec):
            config = CompressionConfig(mlp="half", drop_padding=True)
            model = patch_model(llama(2, hidden=64).train(), config)
            kept.append(kept_bytes(lambda model=model: model(**batch), "cpu"))
    assert kept[1] < 0.9 * kept[0]


def test_what_is_refused() -> None:
    with pytest.raises(RegistrationError, match="'int8' was not registered: the name is taken"):
        register_codec("int8", Half())
    with pytest.raises(RegistrationError, match="an equal codec is known as 'int8'"):
        register_codec("eight", IntGroup(8))
    with pytest.raises(CodecError, match="not an instance"):
        register_codec("half", Half)  # type: ignore[arg-type]
    with pytest.raises(CodecError, match="has no pack, unpack, nbytes"):
        register_codec("none", object())  # type: ignore[arg-type]
    for codec, what in ((Naive(), "does not inherit"), (Hashless(), "cannot be hashed"), (NoData(), "memory address")):
        with pytest.raises(CodecError, match=what):
            register_codec("own", codec)  # type: ignore[arg-type]
        with pytest.raises(CodecError, match=what):
            CompressionConfig(mlp=codec)  # type: ignore[arg-type]
    with pytest.raises(CodecError, match=r"is a class.*pass Half\(\.\.\.\)"):
        CompressionConfig(mlp=Half)  # type: ignore[arg-type]
    # the refused codecs and configs have changed nothing
    assert CompressionConfig().lossless
    with pytest.raises(RegistrationError, match="is no CompressionConfig"):
        register_preset("mine", {"mlp": "int8"})  # type: ignore[arg-type]
    with pytest.raises(RegistrationError, match="'exact'"):
        register_preset("exact", CompressionConfig())
    with pytest.raises(UnknownOptionError, match="gelu"):
        register_activation(nn.Linear, "what")
    with pytest.raises(RegistrationError, match="the class is known"):
        register_activation(nn.SiLU, "silu")
    with pytest.raises(UnknownOptionError, match="'mlps'"):
        CompressionConfig.from_dict({"mlps": "int8"})


class Swish(nn.Module):
    """An activation of another package, written in Python."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


def test_an_activation_and_a_rule_of_ones_own() -> None:
    model = bert(2, hidden=64)
    for layer in model.bert.encoder.layer:
        layer.intermediate.intermediate_act_fn = Swish()
    with register_activation(Swish, "silu"):
        before = _kept(model, None)
        assert _kept(model, CompressionConfig(net=False)) < before
        assert sum(row.module == "Swish" for row in patch_report(model).patched) == 2

    def never(module: nn.Module, config: CompressionConfig) -> Declined | None:
        return Declined("norm", "ours to keep") if isinstance(module, nn.LayerNorm) else None

    registration = register_rule(never)
    with pytest.raises(RegistrationError, match="registered already"):
        register_rule(never)
    patch_model(model)
    assert "ours to keep" in str(patch_report(model))
    registration.remove()
    registration.remove()
    patch_model(model)
    assert "ours to keep" not in str(patch_report(model))


@pytest.mark.parametrize("answer", [True, "mlp", Site(nn.ReLU, Settings(role=Role.LINEAR))], ids=str)
def test_a_rule_with_a_wrong_answer_is_named(answer: Any) -> None:
    def careless(module: nn.Module, config: CompressionConfig) -> Any:
        return answer if isinstance(module, nn.Linear) else None

    with register_rule(careless), pytest.raises(RuleError, match=r"the rule careless answered .* for a Linear"):
        patch_model(llama(2, hidden=64))


def test_rules_of_others_are_asked_before_those_of_heads_and_checkpoints() -> None:
    def never(module: nn.Module, config: CompressionConfig) -> Declined | None:
        ours = isinstance(module, GradientCheckpointingLayer) or getattr(module, "out_features", 0) == VOCAB
        return Declined(Role.OTHER, "ours to keep") if ours else None

    config = CompressionConfig(checkpoint_input="int8_outliers", plans=False)
    wanted = {Role.LOSS_HEAD, Role.CHECKPOINT_INPUT}
    assert wanted <= {row.role for row in patch_report(patch_model(llama(2, hidden=64), config)).patched}
    with register_rule(never):
        report = patch_report(patch_model(llama(2, hidden=64), config))
    assert not wanted & {row.role for row in report.patched}
    assert sum(row.reason == "ours to keep" for row in report.rows) == 3


@pytest.mark.parametrize("codec", [Half(), *CODECS.values()], ids=str)
def test_the_check_of_codecs(codec: Codec) -> None:
    check_codec(codec)


def test_the_check_finds_what_is_broken() -> None:
    class Wide(Half):
        def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
            return 0

    class Flat(Half):
        def unpack(self, tensors: tuple[Tensor, ...], meta: object) -> Tensor:
            return tensors[0].flatten()

    with pytest.raises(AssertionError, match="says fewer"):
        check_codec(Wide())
    with pytest.raises(AssertionError, match="came back as"):
        check_codec(Flat())


def test_configs_under_names_of_ones_own(tmp_path: Path) -> None:
    ids = torch.arange(64).view(2, 32)
    configs = {"eight": "int8", "mlp 4": CompressionConfig(mlp="int4")}
    found = compare_presets(llama(2, hidden=64), {"input_ids": ids, "labels": ids}, configs, seeds=1)
    assert [report.preset for report in found.reports] == ["eight", "mlp 4"]
    (table,) = found.tables()
    head, *rows = csv.reader(table.to_csv().splitlines())
    assert head[0] == "preset" and [row[0] for row in rows] == ["eight", "mlp 4"]
    assert table.to_markdown().count("\n") == 4 and "| ---: |" in table.to_markdown()
    assert r"\%" in table.to_latex() and table.to_latex().startswith(r"\begin{tabular}{lrrrr}")
    assert type(found).from_json(found.to_json()) == found


def test_a_config_in_a_folder(tmp_path: Path) -> None:
    config = CompressionConfig.from_preset("int4", overrides=(("layers.1", "mlp", "int8"),), checkpoint=("layers.0",))
    config.save_pretrained(tmp_path / "model")
    assert CompressionConfig.from_pretrained(tmp_path / "model") == config
    assert json.loads((tmp_path / "model" / "actcompress_config.json").read_text())["mlp"] == config.mlp
    with pytest.raises(FileNotFoundError):
        CompressionConfig.from_pretrained(tmp_path)


def _trainer(folder: Path, preset: str, **options: Any) -> tuple[Trainer, ActCompressCallback]:
    data = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 8
    arguments = TrainingArguments(
        folder, max_steps=options.pop("steps"), save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, **options
    )
    callback = ActCompressCallback(preset)
    return Trainer(llama(2, hidden=64), arguments, train_dataset=data, callbacks=[callback]), callback


def test_a_run_that_resumes_knows_its_setting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _trainer(tmp_path, "int8", steps=2)[0].train()
    checkpoint = str(tmp_path / "checkpoint-2")
    with caplog.at_level(logging.WARNING, logger="hf_actcompress"):
        trainer, callback = _trainer(tmp_path, "int8", steps=3)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert "another config" not in caplog.text
        trainer, callback = _trainer(tmp_path, "exact", steps=3)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert "written under another config" in caplog.text and "'mlp': 'identity'" in caplog.text
        caplog.clear()
        trainer, _ = _trainer(tmp_path, "exact", steps=3, restore_callback_states_from_checkpoint=True)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert "another config" not in caplog.text
        assert {row.codec for row in patch_report(trainer.model).patched} >= {"int8"}


def test_a_run_resumes_where_the_codec_of_its_checkpoint_is_not_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with register_codec("half", Half()):
        _trainer(tmp_path, CompressionConfig(mlp="half"), steps=2)[0].train()
    checkpoint = str(tmp_path / "checkpoint-2")
    with caplog.at_level(logging.WARNING, logger="hf_actcompress"):
        _trainer(tmp_path, "exact", steps=3)[0].train(resume_from_checkpoint=checkpoint)
    assert "written under another config" in caplog.text
    with pytest.raises(UnknownOptionError, match="'half'.*a codec of your own, once it is registered"):
        trainer, _ = _trainer(tmp_path, "exact", steps=3, restore_callback_states_from_checkpoint=True)
        trainer.train(resume_from_checkpoint=checkpoint)
