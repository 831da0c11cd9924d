"""The loss head together with checkpointing, adapters, hooks, other losses, a forward that fails, and reports."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from hf_actcompress import CompressionConfig, ops, patch_model, patch_report, unpatch_model
from tests.models.loss_head_models import V, batch, bert, error, llama, pair, step
from tests.oracle import EXACT

peft = pytest.importorskip("peft")


def test_generate_is_stocks():
    stock, ours = pair(llama, logits=False)
    ids = torch.randint(1, V, (2, 5))
    stock.eval(), ours.eval()
    assert torch.equal(*(m.generate(ids, max_new_tokens=4, do_sample=False) for m in (stock, ours)))


@pytest.mark.parametrize("logits", (True, False))
def test_gradient_checkpointing(logits):
    stock, ours = pair(lambda: llama(tie_word_embeddings=True), logits=logits)
    inputs = batch()
    _, plain = step(ours, inputs)
    for model in (stock, ours):
        model.gradient_checkpointing_enable()
    (expected, _), (found, grads) = step(stock, inputs), step(ours, inputs)
    assert torch.equal(found.loss, expected.loss) or not logits
    assert all(torch.equal(grads[name], plain[name]) for name in grads)


@pytest.mark.parametrize("first", ("patch", "peft"))
@pytest.mark.parametrize("logits", (True, False))
@pytest.mark.parametrize("how", ({"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["lm_head"]}))
def test_adapters_on_the_head_train(how, logits, first):
    base, inputs = llama().train(), batch()
    config = peft.LoraConfig(r=2, init_lora_weights=False, **{"target_modules": ["q_proj"], **how})
    torch.manual_seed(1)
    stock = peft.get_peft_model(copy.deepcopy(base), config).train()
    torch.manual_seed(1)
    settings = CompressionConfig(logits=logits)
    if first == "patch":
        ours = peft.get_peft_model(patch_model(copy.deepcopy(base), settings), config).train()
    else:
        ours = patch_model(peft.get_peft_model(copy.deepcopy(base), config), settings).train()
    ours.load_state_dict(stock.state_dict())
    (expected, stock_grads), (found, grads) = step(stock, inputs), step(ours, inputs)
    _, truth = step(copy.deepcopy(stock).double(), inputs)
    assert abs(found.loss - expected.loss) <= 4 * 8 * torch.finfo(torch.float32).eps
    assert grads.keys() == stock_grads.keys() and any("lm_head" in name for name in grads)
    assert all(grads[name].abs().sum() > 0 for name in grads if "lm_head" in name)
    assert error(grads, truth) <= EXACT * error(stock_grads, truth)
    if "modules_to_save" in how:
        assert isinstance(found.logits, ops.DeferredLogits) == (not logits)


def test_report_and_unpatch():
    model = bert().train()
    patch_model(model)
    rows = [row for row in patch_report(model).rows if row.role == "loss_head"]
    (row,) = rows
    assert (row.name, row.kind, row.reason, row.note) == ("cls.predictions.decoder", "lazy_logits", "", "")
    # at most twice the bytes of the weight's gradient
    assert row.keeps == f"logits<{2 * model.cls.predictions.decoder.weight.nbytes >> 10}K"
    assert type(unpatch_model(model).cls.predictions.decoder) is torch.nn.Linear
    patch_model(model, CompressionConfig(loss_head=False))
    (row,) = (row for row in patch_report(model).rows if row.role == "loss_head")
    assert "loss_head=False" in row.reason
    assert model(**batch()).logits is not None


def test_a_hook_on_the_head_sees_plain_logits():
    _, ours = pair(llama, logits=False)
    seen = []
    ours.lm_head.register_forward_hook(lambda module, args, output: seen.append(output))
    output = ours(**batch())
    assert type(seen[0]) is Tensor and torch.equal(output.logits, seen[0])


def test_another_loss_function_gets_plain_logits():
    _, ours = pair(llama)
    seen = []

    def loss_function(logits, labels, vocab_size, **kwargs):
        seen.append(type(logits))
        return logits.float().square().mean()

    ours.loss_function = loss_function
    step(ours, batch())
    assert seen == [Tensor]


def test_a_forward_that_fails_leaves_no_scope_behind():
    stock, ours = pair(llama, logits=False)
    inputs = batch()
    with pytest.raises(IndexError):
        ours(input_ids=inputs["input_ids"], labels=torch.full_like(inputs["labels"], V + 5))
    assert type(ours.lm_head(torch.randn(2, 32))) is Tensor
    assert torch.equal(ours(input_ids=inputs["input_ids"]).logits, stock(input_ids=inputs["input_ids"]).logits)
