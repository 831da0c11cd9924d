"""patch_report describes the model as it is now, names each module that keeps much, and advises what can be done.

Tables of reports print every character in LaTeX.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_actcompress import PRESETS, CompressionConfig, memory_report, patch_model, patch_report
from hf_actcompress.config_checks import CODEC_FIELDS
from hf_actcompress.display.tables import Table
from hf_actcompress.errors import MeasurementError
from hf_actcompress.memory.planning.costs import GROUPS
from hf_actcompress.modules.base import settings_of
from hf_actcompress.roles import Role
from tests.families import BODY, BY_NAME

_SIZES = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS = {**_SIZES, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**_EXPERTS, "num_local_experts": 4}),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", {**_EXPERTS, "num_experts": 4}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {**_EXPERTS, "num_local_experts": 4, "head_dim": 8}),
    "mamba": (
        "MambaConfig", "MambaForCausalLM",
        {"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "use_cache": False},
    ),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"vocab_size": 67, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "opt": (
        "OPTConfig", "OPTForCausalLM",
        {"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64,
         "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    ),
    "deberta": (
        "DebertaV2Config", "DebertaV2ForMaskedLM",
        {"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
         "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_position_embeddings": 64},
    ),
    "t5": ("T5Config", "T5ForConditionalGeneration", {
        "vocab_size": 67, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0,
    }),
}  # fmt: skip


def build(name: str) -> Any:
    config, model, options = MODELS[name]
    torch.manual_seed(0)
    return getattr(hf, model)(getattr(hf, config)(**options)).train()


def named(row: str, rows: set[str]) -> bool:
    """Whether the module, one of its parents or one of its children has a row."""
    return any(row == name or row.startswith(f"{name}.") or name.startswith(f"{row}.") for name in rows if name)


@pytest.mark.parametrize("name", MODELS)
def test_what_keeps_more_than_a_percent_is_named(name: str) -> None:
    model = patch_model(build(name))
    ids = torch.randint(3, 67, (2, 24))
    measured = memory_report(model, {"input_ids": ids, "labels": ids})
    rows = {row.name for row in patch_report(model).rows if row.role != "embedding"}
    total = sum(row.patched_bytes for row in measured.rows)
    large = [row for row in measured.rows if row.patched_bytes > 0.01 * total and row.module]
    assert large and not [row.module for row in large if not named(row.module, rows)]


@pytest.mark.parametrize(("name", "role"), [("mixtral", "experts"), ("gpt_oss", "experts"), ("mamba", "conv")])
def test_what_no_rule_knows_has_a_reason(name: str, role: str) -> None:
    model = build(name)
    if role == "experts":
        model.set_experts_implementation("eager")
    reasons = [row.reason for row in patch_report(patch_model(model)).left_alone if row.role == role]
    assert reasons and all("stock" in reason for reason in reasons)


@pytest.mark.parametrize("name", MODELS)
def test_roles_are_those_of_the_enum(name: str) -> None:
    roles = {row.role for row in patch_report(patch_model(build(name))).rows}
    assert roles and not roles - {role.value for role in Role}


def test_roles_name_fields_of_a_config_and_groups_of_a_plan() -> None:
    assert {role.field for role in Role} - {""} == {*CODEC_FIELDS, "other"}
    assert {role.group for role in Role} - {""} == set(GROUPS)
    assert all(role.field for role in Role if role.group)


@pytest.mark.parametrize("preset", PRESETS)
def test_codecs_have_the_names_of_the_config(preset: str) -> None:
    """That holds for codecs that learn something for their module; by these names compiled graphs find them."""
    model = patch_model(BY_NAME["llama"].build(), preset)
    codecs = {row.name: row.codec for row in patch_report(model).patched}
    for layer, field in (("mlp.down_proj", "linear"), ("input_layernorm", "norm")):
        name = f"model.layers.0.{layer}"
        settings = settings_of(model.get_submodule(name))
        assert settings is not None
        assert codecs[name] == settings.codec_name == getattr(PRESETS[preset].at(name), field)


def test_batch_norm_and_attention_of_its_own_are_named() -> None:
    resnet = hf.ResNetForImageClassification(
        hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", num_labels=2)
    )
    report = patch_report(patch_model(resnet))
    assert {row.module for row in report.patched if row.role == "batch_norm"} == {"BatchNorm2d"}
    frozen = hf.RTDetrResNetBackbone(hf.RTDetrResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1]))
    frozen.embedder.embedder[0].normalization = nn.SyncBatchNorm(4)
    kinds = {row.module for row in patch_report(patch_model(frozen)).left_alone if row.role == "norm"}
    assert kinds == {"SyncBatchNorm"}
    deberta = patch_model(build("deberta"), CompressionConfig(selective=False))
    assert "attention" in {row.role for row in patch_report(deberta).left_alone}


def test_advice_is_what_the_model_supports() -> None:
    """The report does not advise "sdpa" for a model type that has only eager attention."""
    body = CompressionConfig(loss_head=False, selective=False)
    eager = patch_report(patch_model(BY_NAME["llama"].build(attn_implementation="eager"), body))
    assert any('"sdpa"' in row.reason for row in eager.left_alone)
    oss = patch_report(patch_model(build("gpt_oss"), body))
    reasons = [row.reason for row in oss.left_alone if row.role == "attention"]
    assert reasons and not any('load the model with "sdpa"' in reason for reason in reasons)


def test_a_forward_that_was_bound_later_is_said() -> None:
    model = patch_model(BY_NAME["llama"].build(), BODY)
    down = model.model.layers[0].mlp.down_proj
    down.forward = type(down).forward.__get__(down)
    (row,) = (row for row in patch_report(model).left_alone if row.name.endswith("layers.0.mlp.down_proj"))
    assert "bound on the instance" in row.reason


def test_a_module_that_came_later_is_said() -> None:
    model = patch_model(BY_NAME["llama"].build(), BODY)
    model.model.layers[1].mlp.down_proj = nn.Linear(56, 32)
    (row,) = (row for row in patch_report(model).left_alone if row.name.endswith("layers.1.mlp.down_proj"))
    assert "next forward" in row.reason
    ids = BY_NAME["llama"].make_batch()["input_ids"]
    model(input_ids=ids)
    assert not [row for row in patch_report(model).left_alone if row.name == "model.layers.1.mlp.down_proj"]


def test_latex_prints_every_character() -> None:
    table = Table(("<preset>", "a~b^c"), (("50% & more", r"h.0\x{}"), ("$int8_#1", "plain")), numbers=("a~b^c",))
    assert table.to_latex().splitlines() == [
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"\textless{}preset\textgreater{} & a\textasciitilde{}b\textasciicircum{}c \\",
        r"\midrule",
        r"50\% \& more & h.0\textbackslash{}x\{\} \\",
        r"\$int8\_\#1 & plain \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_equal_modules_share_a_row_of_the_printed_table(capsys: pytest.CaptureFixture[str]) -> None:
    """With adapters in 16 layers it is one screen of 80 columns; the JSON has every module."""
    config = hf.LlamaConfig(**{**_SIZES, "num_hidden_layers": 16})
    model = get_peft_model(hf.LlamaForCausalLM(config), LoraConfig(target_modules="all-linear"))
    for preset in ("exact", "int8", "long", "int4_attention"):
        found = patch_report(patch_model(model, preset))
        found.print()
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) < 30 and max(map(len, lines)) <= 80
        (table,) = found.tables()
        assert sum(int(row[0]) for row in table.rows) == len(found.rows) > 200
        assert any("layers.*" in row[-1] for row in table.rows)
    # the preset does what it should, and the lines below the table say so
    said = "remark: 16 layer: self_attn keeps something in a way that plans do not know; it runs module by module"
    assert said in " ".join(map(str.strip, lines))


def test_a_batch_that_is_no_mapping_is_named() -> None:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**_SIZES))
    with pytest.raises(MeasurementError, match="keyword arguments, as .*, and got a list"):
        memory_report(model, [1, 2])  # type: ignore[arg-type]


def test_the_repr_of_a_config_is_code_that_makes_it() -> None:
    assert repr(CompressionConfig()) == "CompressionConfig()"
    for config in PRESETS.values():
        assert eval(repr(config), {"CompressionConfig": CompressionConfig}) == config
        assert "identity" not in repr(config)
