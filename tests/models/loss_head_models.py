"""Small models with every kind of loss head, stock and patched, and one step of them."""

from __future__ import annotations

import copy

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

from hf_actcompress import CompressionConfig, patch_model

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
