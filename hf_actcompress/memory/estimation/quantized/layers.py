"""Which layers a quantisation method packs, as the integrations of transformers and optimum choose them.

| method | packs | leaves alone |
|---|---|---|
| bitsandbytes | `nn.Linear` itself, `Conv1D` | `llm_int8_skip_modules`; if left out: head, tied and last layer |
| GPTQ | `nn.Linear`, `Conv1D`, subclasses; in the blocks | all but `modules_in_block_to_quantize`, where stated |
| AWQ | `nn.Linear` and subclasses | `modules_to_not_convert`, and head, tied and last layer |
| torchao | `nn.Linear` and subclasses | `modules_to_not_convert`; if left out: head, tied and last layer |
| mxfp4 | the experts of gpt-oss | the same |

All but GPTQ also leave alone what a model keeps in fp32, which its class names. Weights that no layer of these kinds
holds stay as they are: embeddings, and experts that are one parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from ....quick.question import MOST_UNPACKED
from ...measurement.saved_tensors import layer_names
from .formats import method_of, options_of

# in this order optimum looks for a model's blocks
_BLOCKS = ("transformer.h", "model.decoder.layers", "gpt_neox.layers", "model.layers")


def features(layer: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a linear layer. `Conv1D`, which GPT-2 has, stores the transpose of its weight."""
    if isinstance(layer, Conv1D):
        return layer.nx, layer.nf
    assert isinstance(layer, nn.Linear)
    return layer.in_features, layer.out_features


def is_wanted(model: nn.Module, config: Any) -> Callable[[str], bool]:
    """Whether the method packs a layer with that path, if it is of a kind that it packs."""
    options, method = options_of(config), method_of(config)
    if method == "gptq":
        return _in_blocks(model, options)
    stated = options.get("llm_int8_skip_modules" if method == "bitsandbytes" else "modules_to_not_convert")
    in_fp32 = list(getattr(model, "_keep_in_fp32_modules", None) or ())
    kept = HfQuantizer.get_modules_to_not_convert(model, stated, in_fp32, add_default_skips=method == "awq")  # type: ignore[arg-type]
    # torchao compares the names of weights, so that the end of a layer's name alone keeps nothing
    last = ".weight" if method == "torchao" else ""
    return lambda path: bool(should_convert_module(path + last, kept))


def packed_layers(model: nn.Module, config: Any) -> Iterator[tuple[str, nn.Module]]:
    """Path and layer of each linear layer that the method packs."""
    method, wanted = method_of(config), is_wanted(model, config)
    for path, module in model.named_modules():
        if _is_of_kind(module, method) and wanted(path):
            yield path, module


def unpacked_note(model: nn.Module, packed: int) -> Iterator[str]:
    """Says that a large share of the frozen weights is not packed, and which kind of module has the most of these;
    nothing if no weight is packed.
    """
    left: Counter[str] = Counter()
    owners = {id(p): module for module in model.modules() for p in module.parameters(recurse=False)}
    for p in model.parameters():
        if not p.requires_grad and p.is_floating_point():
            left[type(owners[id(p)]).__name__] += p.numel()
    if packed and left.total() > MOST_UNPACKED * (left.total() + packed):
        share, most = packed / (left.total() + packed), max(left, key=left.__getitem__)
        yield f"only {share:.0%} of the frozen weights are packed; of the others {most} has most"


def _is_of_kind(module: nn.Module, method: str) -> bool:
    if isinstance(module, Conv1D):
        return method in ("bitsandbytes", "gptq")
    if method == "bitsandbytes":
        return type(module) is nn.Linear
    # a router returns several tensors, so no other layer can take its place; its weight is small
    return isinstance(module, nn.Linear) and module.weight.is_floating_point() and "Router" not in type(module).__name__


def _in_blocks(model: nn.Module, options: Mapping[str, Any]) -> Callable[[str], bool]:
    names = [name for name, _ in model.named_modules()]
    known = (options.get("block_name_to_quantize"), *(b for b in _BLOCKS if any(b in name for name in names)))
    blocks = next((name for name in known if name), None)
    prefixes = (blocks,) if blocks else tuple(layer_names(model))
    inside = tuple(name for group in options.get("modules_in_block_to_quantize") or () for name in group) or ("",)
    return lambda path: path.startswith(prefixes) and path.endswith(inside)
