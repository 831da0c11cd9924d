"""Every family of the table against its stock self: values, gradients, outputs, keys, reports."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_actcompress import CompressionConfig, patch_model, patch_report
from tests.families import (
    BODY,
    FAMILIES,
    MODES,
    Family,
    build,
    cast_batch,
    differing,
    mode_of,
    oracle_step,
    relative_error,
    step,
)
from tests.oracle import EXACT

families = pytest.mark.parametrize("family", FAMILIES, ids=[family.name for family in FAMILIES])
modes = pytest.mark.parametrize("mode", MODES)


def _assert_like_stock(family: Family, mode: str, model: Any, batch: dict[str, Any], seed: int = 7) -> None:
    """The loss is bit-equal; so are the gradients where the row promises it, and the same parameters have one."""
    stock_loss, stock = step(model, batch, mode, seed)
    loss, ours = step(patch_model(model, BODY), batch, mode, seed)
    assert torch.isfinite(loss)
    assert torch.equal(loss, stock_loss), f"loss {loss} differs from stock's {stock_loss}"
    assert ours.keys() == stock.keys()
    if mode in family.bit_equal:
        assert not differing(ours, stock)


@pytest.mark.daily(5)
@families
@modes
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_loss_and_gradients_like_stock(family: Family, mode: str, dropout: float) -> None:
    for padding in family.paddings:
        model = build(family, mode, dropout=dropout)
        _assert_like_stock(family, mode, model, family.make_batch(padding))


@pytest.mark.daily(3)
@families
@modes
def test_error_against_fp64_oracle(family: Family, mode: str) -> None:
    """Law 2 with the whole preset, over all parameters: ||ours - oracle|| <= 1.1 ||stock - oracle||.

    The two errors are different roundings of the same size, so that the ratio of a single parameter scatters around 1
    by as much as the law allows. Over all parameters, three seeds and all paddings (as sums of squares relative to each
    gradient's own size) it scatters by 1 to 2 percent.
    """
    own = error = 0.0
    for padding in family.paddings:
        for seed in range(3):
            model = build(family, mode, seed=seed)
            batch = family.make_batch(padding, seed)
            oracle = oracle_step(model, batch)
            own += relative_error(step(model, batch, mode)[1], oracle) ** 2
            error += relative_error(step(patch_model(model), batch, mode)[1], oracle) ** 2
    assert own > 0
    assert error**0.5 <= EXACT * own**0.5


@pytest.mark.daily(3)
@families
def test_eager_attention_and_its_outputs(family: Family) -> None:
    """Eager attention keeps no probabilities, and still returns probabilities and hidden states."""
    model = family.build(torch.bfloat16, attn_implementation="eager")
    batch = cast_batch(family.make_batch(family.paddings[-1]), torch.bfloat16)
    asked = {"output_attentions": True, "output_hidden_states": True}
    stock = model(**batch, **asked)
    loss, grads = step(model, batch)
    patch_model(model, BODY)
    _assert_same_outputs(model(**batch, **asked), stock)
    ours_loss, ours = step(model, batch)
    assert torch.equal(ours_loss, loss)
    if "bf16" in family.bit_equal:
        assert not differing(ours, grads)
    report = patch_report(model)
    assert not [row for row in report.left_alone if row.role == "attention"]
    assert [row for row in report.patched if row.role == "in_parts" and not row.note]


@families
def test_hidden_states_with_sdpa(family: Family) -> None:
    model = family.build()
    batch = family.make_batch(family.paddings[-1])
    stock = model(**batch, output_hidden_states=True)
    _assert_same_outputs(patch_model(model, BODY)(**batch, output_hidden_states=True), stock)


def _assert_same_outputs(ours: Any, stock: Any) -> None:
    assert ours.keys() == stock.keys()
    for name in stock:
        a, b = ours[name], stock[name]
        if isinstance(b, Tensor):
            assert torch.equal(a, b), name
        elif isinstance(b, tuple):
            assert len(a) == len(b) >= (name == "hidden_states"), name
            for x, y in zip(a, b, strict=True):
                assert x is y is None or torch.equal(x, y), name


@families
@modes
def test_eval_and_no_grad_outputs_are_stock(family: Family, mode: str) -> None:
    model = build(family, mode, dropout=0.1)
    dtype = next(model.parameters()).dtype
    batch = cast_batch(family.make_batch(family.paddings[-1]), dtype)
    with mode_of(mode):
        stock = _evaluated(model, batch)
        ours = _evaluated(patch_model(model, BODY), batch)
    for a, b in zip(ours, stock, strict=True):
        _assert_same_outputs(a, b)


def _evaluated(model: Any, batch: dict[str, Any]) -> list[Any]:
    """eval with and without grad, and train mode without grad, from one seed."""
    outputs = [model.eval()(**batch)]
    with torch.no_grad():
        outputs.append(model(**batch))
        torch.manual_seed(3)
        outputs.append(model.train()(**batch))
    with torch.inference_mode():
        outputs.append(model.eval()(**batch))
    model.train()
    return outputs


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.task in ("causal", "seq2seq")], ids=lambda f: f.name)
@pytest.mark.parametrize("sample", [False, True])
def test_generate_is_stock(family: Family, sample: bool) -> None:
    model = family.build().eval()
    batch = family.make_batch("left")
    prompt = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    options = {"max_new_tokens": 6, "do_sample": sample, "use_cache": True, "pad_token_id": 0}
    if sample:
        options["top_k"] = 5
    torch.manual_seed(1)
    stock = model.generate(**prompt, **options)
    torch.manual_seed(1)
    assert torch.equal(patch_model(model, BODY).generate(**prompt, **options), stock)


@families
def test_state_dict_and_parameters_are_stock(family: Family) -> None:
    model = family.build()
    before = {name: (t.data_ptr(), t.clone()) for name, t in model.state_dict().items()}
    identities = [id(p) for p in model.parameters()]
    patch_model(model, BODY)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(t.data_ptr() == before[n][0] and torch.equal(t, before[n][1]) for n, t in after.items())
    assert [id(p) for p in model.parameters()] == identities


@families
def test_report_covers_the_model(family: Family) -> None:
    """All leaves with parameters (but a convolution) and all attention modules are patched, or listed with a reason."""
    model = patch_model(family.build())
    report = patch_report(model)
    rows = {row.name: row for row in report.rows}
    for name, module in model.named_modules():
        leaf = next(module.parameters(recurse=False), None) is not None and not list(module.children())
        if leaf and not isinstance(module, torch.nn.Conv2d):
            assert name in rows, f"{name} ({type(module).__name__}) is in no row of the report"
    assert {row.role for row in report.patched} >= {"linear", "norm", "attention", "activation"}
    # RoBERTa's head calls a function for its activation
    own_calls = {"roberta": {"RobertaLMHead"}}
    assert {row.module for row in report.left_alone if row.role == "functions"} == own_calls.get(family.name, set())
    # OPT's layers call the dropout function, which is part of their plans
    leaves = patch_report(patch_model(model, CompressionConfig(plans=False)))
    own_calls["opt"] = {"OPTDecoderLayer"}
    assert {row.module for row in leaves.left_alone if row.role == "functions"} == own_calls.get(family.name, set())
    # T5's layers run leaf by leaf because their attention takes a bias
    assert {row.role for row in report.left_alone} <= {"embedding", "loss_head", "functions", "layer"}
    assert all(row.reason or row.note for row in report.left_alone)
    assert {row.codec for row in report.patched if row.role != "layer"} == {"identity"}


@families
def test_gradient_accumulation_and_second_backward(family: Family) -> None:
    """Two micro-batches into the same .grad, and the same graph run backward twice."""
    batches = [family.make_batch(family.paddings[-1], seed) for seed in (0, 1)]
    model = family.build(torch.bfloat16)
    reference = copy.deepcopy(model)
    patch_model(model, BODY)
    for m in (model, reference):
        for batch in batches:
            m(**cast_batch(batch, torch.bfloat16)).loss.backward()
        loss = m(**cast_batch(batches[0], torch.bfloat16)).loss
        loss.backward(retain_graph=True)
        loss.backward()
    grads, stock = ({n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (model, reference))
    assert grads.keys() == stock.keys()
    if "bf16" in family.bit_equal:
        assert not differing(grads, stock)
