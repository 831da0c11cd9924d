"""The loss head in whole models: what comes out, what is kept, and who else may touch the head."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_actcompress import CompressionConfig, patch_model, patch_report, unpatch_model
from hf_actcompress.memory import kept_bytes, trace
from hf_actcompress.records import live_entries
from tests.oracle import EXACT

peft = pytest.importorskip("peft")

V = 301
BLOCK = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}


def llama(v=V, **options):
    return LlamaForCausalLM(LlamaConfig(vocab_size=v, **BLOCK, **options))


def gpt2(v=V, **options):
    dropout = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    config = GPT2Config(vocab_size=v, n_embd=32, n_layer=1, n_head=2, use_cache=False, **dropout, **ids, **options)
    return GPT2LMHeadModel(config)


def bert(v=V, **options):
    block = {name: value for name, value in BLOCK.items() if name != "num_key_value_heads"}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForMaskedLM(BertConfig(vocab_size=v, **block, **dropout, **options))
    torch.nn.init.normal_(model.cls.predictions.decoder.bias)
    return model


def gemma2(v=V):
    return Gemma2ForCausalLM(Gemma2Config(vocab_size=v, head_dim=16, **BLOCK))


def cohere(v=V):
    return CohereForCausalLM(CohereConfig(vocab_size=v, **BLOCK))


def t5(v=V):
    config = T5Config(vocab_size=v, d_model=32, d_ff=48, num_layers=1, num_heads=2, d_kv=16, dropout_rate=0.0)
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config)


MODELS = {
    "llama": llama,
    "llama tied": lambda: llama(tie_word_embeddings=True),
    "gpt2": gpt2,
    "gpt2 untied": lambda: gpt2(tie_word_embeddings=False),
    "bert": bert,
    "bert untied": lambda: bert(tie_word_embeddings=False),
    "gemma2 softcap": gemma2,
    "cohere scale": cohere,
    "t5": t5,
}


def batch(v=V, rows=4, length=33):
    ids = torch.randint(1, v, (rows, length))
    return {"input_ids": ids, "labels": torch.where(torch.rand(ids.shape) < 0.3, -100, ids)}


def pair(make, dtype=torch.float32, **config):
    stock = make().to(dtype).train()
    return stock, patch_model(copy.deepcopy(stock), CompressionConfig(**config))


def step(model, inputs, autocast=False, **kwargs):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(**inputs, **kwargs)
    (output[0] if isinstance(output, tuple) else output.loss).backward()
    return output, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def error(grads: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    return sum(float((grads[n].double() - truth[n].double()).square().sum()) for n in truth) ** 0.5


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
        assert list(found) == list(expected)
    else:
        # a loss of about log V < 8, which is four roundings of numbers no larger, on either side
        assert abs(found.loss - expected.loss) <= 4 * torch.finfo(expected.loss.dtype).eps * 8
        assert "logits" not in found and found.logits is None
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


@pytest.mark.parametrize("name", ("llama", "gpt2", "bert"))
def test_tuples(name):
    inputs = batch()
    for logits in (True, False):
        stock, ours = pair(MODELS[name], logits=logits)
        expected, found = stock(**inputs, return_dict=False), ours(**inputs, return_dict=False)
        assert type(found) is tuple and len(found) == len(expected)
        assert abs(found[0] - expected[0]) <= 4 * 8 * torch.finfo(torch.float32).eps
        assert torch.equal(found[1], expected[1]) if logits else found[1] is None


def test_positional_labels():
    stock, ours = pair(bert, logits=False)
    inputs = batch()
    arguments = (inputs["input_ids"], None, None, None, None, None, None, inputs["labels"])
    assert ours(*arguments).logits is None
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


def test_returned_logits_are_differentiable():
    stock, ours = pair(llama)
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
        assert (found.logits is None) == (not logits)


def test_report_and_unpatch():
    model = bert().train()
    patch_model(model)
    rows = [row for row in patch_report(model).rows if row.role == "loss_head"]
    assert [(row.name, row.variant, row.reason) for row in rows] == [("cls.predictions.decoder", "logits", "")]
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


def kept_and_peak(make, v: int, logits: bool, dtype: torch.dtype) -> tuple[int, int]:
    model = patch_model(make(v).to(dtype).train(), CompressionConfig(logits=logits))
    inputs = batch(v=2000, rows=4, length=128)
    inputs["labels"] = inputs["input_ids"]
    model(**inputs).loss.backward()
    kept = kept_bytes(lambda: model(**inputs), "cpu")
    return kept, trace(lambda: model(**inputs).loss.backward()).peak_bytes


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("make", (llama, gpt2, bert, gemma2))
def test_kept_bytes_and_peak_do_not_grow_with_the_vocabulary(make, dtype):
    for logits in (True, False):
        kept, peaks = zip(*(kept_and_peak(make, v, logits, dtype) for v in (2000, 8000)), strict=True)
        assert kept[0] == kept[1]
        grown = 6000 * 512
        weight = 6000 * 32 * dtype.itemsize
        if logits:
            # the logits themselves, which the caller has, and no fp32 copy of them (a softcap in progress: two more)
            copies = 3 if make is gemma2 else 1
            assert peaks[1] - peaks[0] < grown * (copies * dtype.itemsize + 0.5) + 4 * weight
        else:
            # the gradient of the weight, twice where it is tied and added to
            assert peaks[1] - peaks[0] < grown / 4 + 4 * weight
