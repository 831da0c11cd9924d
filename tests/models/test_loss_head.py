"""The loss head in whole models: what comes out and what is kept."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_actcompress import CompressionConfig, ops, patch_model
from hf_actcompress.errors import UnknownOptionError
from hf_actcompress.memory import allocator_trace, kept_bytes
from hf_actcompress.records import live_entries
from tests.models.loss_head_models import MODELS, batch, bert, error, gemma2, gpt2, llama, pair, step
from tests.oracle import EXACT


@pytest.mark.daily(3)
@pytest.mark.parametrize("logits", (True, False), ids=("logits", "no logits"))
@pytest.mark.parametrize("mode", ("fp32", "bf16", "autocast"))
@pytest.mark.parametrize("name", MODELS)
def test_loss_logits_and_gradients(name, mode, logits):
    stock, ours = pair(MODELS[name], torch.bfloat16 if mode == "bf16" else torch.float32, logits=logits)
    inputs = batch()
    autocast = mode == "autocast"
    expected, stock_grads = step(stock, inputs, autocast)
    found, grads = step(ours, inputs, autocast)
    _, truth = step(copy.deepcopy(stock).double(), inputs)
    if logits:
        assert torch.equal(found.loss, expected.loss) and found.loss.dtype == expected.loss.dtype
        assert type(found.logits) is Tensor and torch.equal(found.logits, expected.logits)
    else:
        # the loss is about log V < 8; the tolerance is four roundings of a number of that size
        assert abs(found.loss - expected.loss) <= 4 * torch.finfo(expected.loss.dtype).eps * 8
        assert isinstance(found.logits, ops.DeferredLogits) and not found.logits.chain.made
        assert torch.equal(found.logits, expected.logits)
    assert list(found) == list(expected)
    assert grads.keys() == stock_grads.keys()
    assert error(grads, truth) <= EXACT * error(stock_grads, truth)
    assert live_entries() == 0


@pytest.mark.parametrize("name", ("llama", "gpt2"))
def test_num_items_in_batch_and_shift_labels(name):
    stock, ours = pair(MODELS[name])
    inputs = batch()
    shifted = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    for options in ({"num_items_in_batch": torch.tensor(57)}, {"num_items_in_batch": 57}, {"shift_labels": shifted}):
        (expected, _), (found, _) = step(stock, inputs, **options), step(ours, inputs, **options)
        assert torch.equal(found.loss, expected.loss)


@pytest.mark.parametrize("mode", ("fp32", "bf16", "autocast"))
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("trained", (True, False), ids=("trained head", "frozen head"))
def test_a_step_of_an_accumulation(name, mode, trained):
    """The loss is a sum over tokens, divided by the number of all tokens of two batches.

    The errors of four batches together: where nothing has stock's bits, one batch alone may be a tenth off by chance.
    """
    stock, ours = pair(MODELS[name], torch.bfloat16 if mode == "bf16" else torch.float32)
    for model in (stock, ours):
        model.get_output_embeddings().requires_grad_(trained)
    truth_model, errors = copy.deepcopy(stock).double(), []
    for inputs in (batch() for _ in range(4)):
        count = 2 * (inputs["labels"][:, 1:] != -100).sum()
        options = {} if name.startswith(("bert", "t5")) else {"num_items_in_batch": count}
        (expected, stock_grads), (found, grads) = (
            step(model, inputs, mode == "autocast", **options) for model in (stock, ours)
        )
        _, truth = step(truth_model, inputs, **options)
        assert torch.equal(found.loss, expected.loss) and found.loss.dtype == expected.loss.dtype
        assert grads.keys() == stock_grads.keys()
        errors.append([error(found, truth) ** 2 for found in (grads, stock_grads)])
    own, stocks = (sum(column) ** 0.5 for column in zip(*errors, strict=True))
    assert own <= EXACT * stocks


def test_a_share_of_targets_reaches_the_head():
    stock, ours = pair(bert, targets=0.8)
    inputs = batch()
    seen = []
    # the module in which the test replaces a function
    deferred_linear = sys.modules["hf_actcompress.ops._deferred_linear"]
    compute = ops.linear_cross_entropy
    with pytest.MonkeyPatch.context() as patch:
        noted = lambda *args, most, **options: (seen.append(most), compute(*args, **options))[1]  # noqa: E731
        patch.setattr(deferred_linear, "linear_cross_entropy", noted)
        (expected, _), (found, _) = step(stock, inputs), step(ours, inputs)
    assert seen == [106] and torch.equal(found.loss, expected.loss)  # 0.8 of 4 x 33
    for share in (0, 1.5, "most"):
        with pytest.raises(UnknownOptionError, match="targets"):
            CompressionConfig(targets=share)


@pytest.mark.parametrize("name", ("llama", "gpt2", "bert"))
def test_tuples(name):
    inputs = batch()
    for logits in (True, False):
        stock, ours = pair(MODELS[name], logits=logits)
        expected, found = stock(**inputs, return_dict=False), ours(**inputs, return_dict=False)
        assert type(found) is tuple and len(found) == len(expected)
        assert abs(found[0] - expected[0]) <= 4 * 8 * torch.finfo(torch.float32).eps
        assert torch.equal(found[1], expected[1])


def test_positional_labels():
    stock, ours = pair(bert, logits=False)
    inputs = batch()
    arguments = (inputs["input_ids"], None, None, None, None, None, None, inputs["labels"])
    assert isinstance(ours(*arguments).logits, ops.DeferredLogits)
    assert torch.allclose(ours(*arguments).loss, stock(*arguments).loss, rtol=1e-6)


@pytest.mark.parametrize("name", ("llama", "bert"))
def test_stock_without_grad_in_eval_and_without_labels(name):
    stock, ours = pair(MODELS[name], logits=False)
    inputs = batch()
    with torch.no_grad():
        assert torch.equal(ours(**inputs).logits, stock(**inputs).logits)
    unlabelled = ours(input_ids=inputs["input_ids"])
    assert unlabelled.loss is None and torch.equal(unlabelled.logits, stock(input_ids=inputs["input_ids"]).logits)
    stock.eval(), ours.eval()
    expected, found = stock(**inputs), ours(**inputs)
    assert torch.equal(found.logits, expected.logits) and torch.equal(found.loss, expected.loss)


@pytest.mark.parametrize("logits", (True, False))
def test_returned_logits_are_differentiable(logits):
    stock, ours = pair(llama, logits=logits)
    inputs = batch()
    grads = []
    for model in (stock, ours):
        output = model(**inputs)
        (output.loss + output.logits.square().mean()).backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    truth_model = copy.deepcopy(stock).double()
    truth_model.zero_grad()
    output = truth_model(**inputs)
    (output.loss + output.logits.square().mean()).backward()
    truth = {name: p.grad for name, p in truth_model.named_parameters()}
    assert error(grads[1], truth) <= EXACT * error(grads[0], truth)


def kept_and_peak(make, v: int, logits: bool, dtype: torch.dtype) -> tuple[int, int]:
    model = patch_model(make(v).to(dtype).train(), CompressionConfig(logits=logits))
    inputs = batch(v=2000, rows=4, length=128)
    inputs["labels"] = inputs["input_ids"]
    model(**inputs).loss.backward()
    kept = kept_bytes(lambda: model(**inputs), "cpu")
    return kept, allocator_trace(lambda: model(**inputs).loss.backward()).peak_bytes


@pytest.mark.daily(3)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("make", (llama, gpt2, bert, gemma2))
def test_kept_bytes_and_peak_do_not_grow_with_the_vocabulary(make, dtype):
    for logits in (True, False):
        kept, peaks = zip(*(kept_and_peak(make, v, logits, dtype) for v in (2000, 8000)), strict=True)
        assert kept[0] == kept[1]
        grown = 6000 * 512
        weight = 6000 * 32 * dtype.itemsize
        if logits:
            # the caller's logits, without an fp32 copy of them; while a softcap is computed there are two more copies
            copies = 3 if make is gemma2 else 1
            assert peaks[1] - peaks[0] < grown * (copies * dtype.itemsize + 0.5) + 4 * weight
        else:
            # the weight's gradient; if the weight is tied, there are two gradients until they are added
            assert peaks[1] - peaks[0] < grown / 4 + 4 * weight


class _Extended(LlamaForCausalLM):
    """Sets fields late, in another order than they are declared, adds an attribute, and nests another output."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutputWithPast:
        inner = super().forward(input_ids, labels=labels)
        other = CausalLMOutputWithPast(hidden_states=(self.model.norm.weight * 2,))
        other.loss = other.hidden_states[0].sum()
        self.untouched = other
        out = CausalLMOutputWithPast(hidden_states=[other])
        out.logits, out.loss, out.more = inner.logits, inner.loss, "more"
        return out


@pytest.mark.parametrize("logits", (True, False))
@pytest.mark.parametrize("labelled", (True, False))
def test_an_output_stays_as_the_model_has_made_it(labelled, logits):
    stock = _Extended(llama().config)
    ours, inputs = copy.deepcopy(stock), batch()
    patch_model(ours, CompressionConfig(logits=logits))
    given = inputs["input_ids"], inputs["labels"] if labelled else None
    expected, found = stock(*given), ours(*given)
    assert list(found) == list(expected) and vars(found).keys() == vars(expected).keys() and found.more == "more"
    assert found.hidden_states[0] is ours.untouched and list(ours.untouched) == list(stock.untouched)
    assert torch.equal(found.logits, expected.logits) and found[0] is found.hidden_states
