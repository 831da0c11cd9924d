"""What recipes/reproduce.py measures: the papers' models at the sizes of a `Scale`, with stock and with a preset."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hf_actcompress import CompressionConfig, kept_bytes, measure_step, patch_model

from .images import Batch, ResMLP

Config = CompressionConfig | str | None
VOCAB = 1024  # for models of which only the layers are measured


@dataclass(frozen=True)
class Scale:
    """How large the models are: widths divided by `shrink`, batches times `rows`, images of `image` pixels."""

    name: str
    device: str = "cpu"
    shrink: int = 1
    rows: int = 1
    image: int = 224

    def width(self, width: int) -> int:
        return width // self.shrink

    def tokens(self, rows: int, length: int) -> Tensor:
        shape = (rows * self.rows, max(16, length // self.shrink))
        return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(0)).to(self.device)

    def images(self, count: int) -> Batch:
        count *= self.rows
        pixels = torch.randn(count, 3, self.image, self.image, generator=torch.Generator().manual_seed(0))
        return {"pixel_values": pixels.to(self.device), "labels": torch.arange(count, device=self.device) % 2}


SCALES = {
    "default": Scale("default"),
    "full": Scale("full", device="cuda", rows=8),
    "quick": Scale("quick", shrink=8, image=64),
}


def mask_bytes(forward: Callable[[], Tensor]) -> int:
    """Bytes that dropout's masks take on a CPU above those on CUDA, where an element of a mask is one byte.

    A mask is a floating tensor that holds 0 and one number above 1.
    """
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.is_floating_point() and x.numel() > 1024 and x.min() == 0:
            top = x.max()
            if top > 1 and bool(((x == 0) | (x == top)).all()):
                found[x.data_ptr()] = x.numel() * (x.element_size() - 1)
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        forward()
    return sum(found.values())


Loss = Callable[[Any], Tensor]


def prepared(model: Any, config: Config, scale: Scale, parts: tuple[type, ...]) -> Any:
    """A patched copy of a stock model. With `parts`, only its modules of these types are patched, one by one."""
    model = copy.deepcopy(model).to(scale.device).train()
    if config is not None:
        for module in [m for m in model.modules() if isinstance(m, parts)] if parts else [model]:
            patch_model(module, config)
    return model


def dropout_excess(model: Any, loss: Loss) -> int:
    drops = any(isinstance(module, nn.Dropout) and module.p for module in model.modules())
    return mask_bytes(lambda: loss(model)) if drops else 0


def kept(model: Any, loss: Loss, config: Config, scale: Scale, parts: tuple[type, ...] = ()) -> int:
    """Bytes kept for backward under a config; None is stock. Dropout's masks count as CUDA keeps them."""
    model = prepared(model, config, scale, parts)
    return kept_bytes(lambda: loss(model), scale.device) - dropout_excess(model, loss)


def peak(model: Any, loss: Loss, config: Config, scale: Scale, parts: tuple[type, ...] = ()) -> int:
    """The peak of a forward and backward above weights and gradients, in bytes; masks as in `kept`."""
    model = prepared(model, config, scale, parts)

    def step() -> None:
        loss(model).backward()

    step()
    return measure_step(step, scale.device).peak_bytes - dropout_excess(model, loss)


def less(model: Any, batch: Batch, config: Config, scale: Scale, measure: Callable[..., int]) -> float:
    """The share of stock's bytes, by `kept` or `peak`, that a config saves."""
    stock, ours = (measure(model, lambda m: m(**batch).loss, c, scale) for c in (None, config))
    return 1 - ours / stock


def per_layer(
    build: Callable[[int], Any], loss: Loss, config: Config, scale: Scale, parts: tuple[type, ...] = ()
) -> tuple[int, int]:
    """Kept bytes of one layer, stock and under a config: those of two layers minus those of one."""
    one, two = ([kept(build(n), loss, c, scale, parts) for c in (None, config)] for n in (1, 2))
    return two[0] - one[0], two[1] - one[1]


def with_states(
    model: Any, loss: Loss, config: Config, scale: Scale, times: float, parts: tuple[type, ...] = ()
) -> float:
    """The share of a training's whole memory that a config saves, at a batch `times` as large.

    Whole memory: 16 bytes per parameter (weight, gradient and AdamW's two states in fp32), plus `times` what is kept
    for backward. It is not the peak, which in a small batch is that of an embedding's gradient.
    """
    states = 16 * sum(p.numel() for p in model.parameters())
    stock, ours = (states + times * kept(model, loss, c, scale, parts) for c in (None, config))
    return 1 - ours / stock


# -- models ------------------------------------------------------------------------------------------------------------


def bert(scale: Scale, layers: int, hidden: int, heads: int, **options: Any) -> Any:
    """BertModel without its pooler."""
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=VOCAB, hidden_size=scale.width(hidden), num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * scale.width(hidden), **options,
    )  # fmt: skip
    return hf.BertModel(config, add_pooling_layer=False)


def gpt2(scale: Scale, layers: int) -> Any:
    """GPT-2's layers without dropout; their GELU is made of single operations."""
    torch.manual_seed(0)
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": VOCAB, "n_embd": scale.width(768), "n_layer": layers, "n_head": 12, "use_cache": False}
    return hf.GPT2Model(hf.GPT2Config(**sizes, **off))


def last_state(ids: Tensor) -> Callable[[Any], Tensor]:
    """A loss that keeps nothing of its own."""
    return lambda model: model(input_ids=ids).last_hidden_state.sum()


def vit_base(scale: Scale) -> Any:
    """ViT-B/16, which has DeiT-B's layers, with the attention that keeps probabilities, as the papers' code had it."""
    torch.manual_seed(0)
    config = hf.ViTConfig(
        hidden_size=scale.width(768), intermediate_size=scale.width(3072), image_size=scale.image,
        num_hidden_layers=12 if scale.shrink == 1 else 2, attn_implementation="eager",
    )  # fmt: skip
    return hf.ViTForImageClassification(config)


def resnet(scale: Scale, depth: int) -> Any:
    torch.manual_seed(0)
    small = depth == 18
    widths = [scale.width(width) for width in ((64, 128, 256, 512) if small else (256, 512, 1024, 2048))]
    config = hf.ResNetConfig(
        embedding_size=scale.width(64), hidden_sizes=widths, depths=[2] * 4 if small else [3, 4, 6, 3],
        layer_type="basic" if small else "bottleneck",
    )  # fmt: skip
    return hf.ResNetForImageClassification(config)


def resmlp_s12(scale: Scale) -> Any:
    torch.manual_seed(0)
    return ResMLP(scale.width(384), 12 if scale.shrink == 1 else 2, scale.image, 16, 2)


def mistral_in_4_bits(scale: Scale, layers: int) -> Any:
    """Mistral's layers at an eighth of the width, with GELU for SiLU; linear layers are frozen, as 4-bit ones are."""
    torch.manual_seed(0)
    width = scale.width(512)
    config = hf.MistralConfig(
        vocab_size=VOCAB, hidden_size=width, intermediate_size=7 * width // 2, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=2, use_cache=False, sliding_window=None, hidden_act="gelu",
    )  # fmt: skip
    model = hf.MistralModel(config)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.requires_grad_(False)
    return model


def llama(scale: Scale, layers: int) -> Any:
    """Llama 2's layers at an eighth of the width, in bf16."""
    torch.manual_seed(0)
    width = scale.width(512)
    config = hf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=width, intermediate_size=43 * width // 16, num_hidden_layers=layers,
        num_attention_heads=4, use_cache=False,
    )  # fmt: skip
    return hf.LlamaModel(config).bfloat16()
