"""How recipes/reproduce.py measures what papers claim: a number at a scale, by the paper's preset or by another one."""

from __future__ import annotations

from collections.abc import Callable

import transformers as hf
from torch import nn

from hf_actcompress import CompressionConfig

from . import paper_settings as at
from .paper_settings import Scale

GELUS = (hf.activations.GELUActivation, nn.GELU)


def _times(pair: tuple[int, int]) -> float:
    return pair[0] / pair[1]


def _less(pair: tuple[int, int]) -> float:
    return 1 - pair[1] / pair[0]


def tempo(scale: Scale, config: str = "tempo") -> float:
    def build(layers: int) -> nn.Module:
        return at.bert(scale, layers, 1024, 16, attn_implementation="eager")

    return _times(at.per_layer(build, at.last_state(scale.tokens(1, 512)), config, scale))


def inverted_bert(scale: Scale) -> float:
    def build(layers: int) -> nn.Module:
        return at.bert(scale, layers, 768, 12, attention_probs_dropout_prob=0.0)

    return _less(at.per_layer(build, at.last_state(scale.tokens(2, 512)), "inverted", scale, GELUS))


def inverted_mistral(scale: Scale) -> float:
    loss = at.last_state(scale.tokens(1, 512))
    return _less(at.per_layer(lambda n: at.mistral_in_4_bits(scale, n), loss, "inverted", scale, GELUS))


def fewbit(scale: Scale) -> float:
    vocabulary, layers = (50265, 12) if scale.shrink == 1 else (at.VOCAB, 2)
    ids = scale.tokens(2, 97)
    model = at.bert(scale, layers, 768, 12, attention_probs_dropout_prob=0.0)
    model.resize_token_embeddings(vocabulary)
    return at.with_states(model, at.last_state(ids), "fewbit", scale, 128 / len(ids), GELUS)


def forward_ad(scale: Scale) -> float:
    parts = (hf.activations.NewGELUActivation,)
    loss = at.last_state(scale.tokens(2, 512))
    return _times(at.per_layer(lambda layers: at.gpt2(scale, layers), loss, "forward_ad", scale, parts))


def mesa(scale: Scale, config: str = "mesa") -> float:
    batch = scale.images(1)
    times = 128 / len(batch["labels"])
    return at.with_states(at.vit_base(scale), lambda model: model(**batch).loss, config, scale, times)


def wtacrs(scale: Scale, preset: str = "wtacrs") -> float:
    def build(layers: int) -> nn.Module:
        width = scale.width(768)
        config = hf.T5Config(vocab_size=at.VOCAB, d_model=width, d_kv=width // 12, d_ff=4 * width, num_layers=layers)
        return hf.T5EncoderModel(config)

    return _times(at.per_layer(build, at.last_state(scale.tokens(8, 128)), preset, scale))


def gact(scale: Scale, config: str = "gact") -> float:
    def build(layers: int) -> nn.Module:
        return at.bert(scale, layers, 1024, 16, attention_probs_dropout_prob=0.0)

    return _times(at.per_layer(build, at.last_state(scale.tokens(4, 128)), config, scale))


def images(
    model: Callable[[Scale], nn.Module], count: int, preset: str, what: Callable[..., int]
) -> Callable[..., float]:
    return lambda scale, config=preset: at.less(model(scale), scale.images(count), config, scale, what)


def actnn(scale: Scale, config: str = "actnn") -> float:
    return 1 / (1 - at.less(at.resnet(scale, 50), scale.images(1), config, scale, at.kept))


def tokens(share: float) -> Callable[..., float]:
    chosen = CompressionConfig(tokens=share)

    def measure(scale: Scale, config: at.Config = chosen) -> float:
        # a layer before it, so that its input needs a gradient
        loss = at.last_state(scale.tokens(2, 512))
        return _less(at.per_layer(lambda layers: at.llama(scale, layers + 1), loss, config, scale))

    return measure
