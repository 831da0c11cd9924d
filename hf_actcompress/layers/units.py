"""Which modules of a model run by plans: layers, blocks of a stack in other models, and modules outside of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..models.heads import output_layers
from ..modules.base import settings_of, stock_type
from ..roles import RUN_BY_PLANS

_LISTS = (nn.ModuleList, nn.ModuleDict)
# these keep their input in any case, whatever a subclass of them adds
_PRODUCTS = (nn.Embedding, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def units_of(model: nn.Module, named: Sequence[str] = ()) -> list[nn.Module]:
    """The blocks that are named, the layers that transformers may checkpoint, and those in lists of other blocks.

    A block may be inside of another one. The outer one's plan runs both; the inner one has a plan of its own for calls
    for which the outer one has none.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    known = {id(part) for layer in layers for part in layer.modules()}
    for blocks in model.modules():
        if id(blocks) not in known:
            layers += _unique((block for block in _blocks(blocks) if _is_block(block)), known)
    return list(dict.fromkeys([*blocks_named(model, named), *layers]))


def outside_of(model: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules of a patched model outside of layers and blocks that have code of their own, such as embeddings, the
    transform before a head, a pooler, or a norm of a model's own making: the outermost ones without a layer, a model or
    a model's output layer inside.

    Args:
        model: The model, which is none of them itself.
        units: Its layers and blocks.
    """
    heads = [head for module in model.modules() for head in output_layers(module)]
    known = {id(part) for module in (*units, *heads) for part in module.modules()}
    return list(dict.fromkeys(_outermost(model, known)))


def _outermost(module: nn.Module, known: set[int]) -> Iterator[nn.Module]:
    """The outermost modules below one that have code of their own, and no model and nothing of `known` inside."""
    for child in module.children():
        parts = list(child.modules())
        if isinstance(child, _LISTS) or any(id(part) in known or isinstance(part, PreTrainedModel) for part in parts):
            yield from _outermost(child, known)
        elif len(parts) > 1 or _is_own_code(child):
            yield child


def _is_own_code(module: nn.Module) -> bool:
    """Whether a module without children, which no rule has patched, computes something by other code than that of
    torch's modules. With buffers alone it makes tables, such as angles."""
    settings, kind = settings_of(module), stock_type(module)
    if isinstance(module, _PRODUCTS) or (settings is not None and settings.role not in RUN_BY_PLANS):
        return False
    torchs = {vars(base).get("forward") for base in kind.__mro__ if base.__module__.startswith("torch.nn.modules.")}
    return bool(module._parameters or not module._buffers) and kind.forward not in {*torchs, nn.Module.forward}


def blocks_named(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The modules that the names stand for: parts of the names of modules, or names of classes. The name of a list
    stands for the modules in it."""
    found: list[nn.Module] = []
    for path, module in model.named_modules():
        if any(stock_type(module).__name__ == name or f".{path}".endswith(f".{name}") for name in names):
            found += module.children() if isinstance(module, (nn.ModuleList, nn.Sequential)) else [module]
    return found


def _unique(blocks: Iterator[nn.Module], known: set[int]) -> Iterator[nn.Module]:
    for block in blocks:
        if id(block) not in known:
            known.add(id(block))
            yield block


def _blocks(stack: nn.Module) -> list[nn.Module]:
    """The modules of a ModuleList, or those of a Sequential of which there are several of one class."""
    found = list(stack.children())
    if isinstance(stack, nn.ModuleList):
        return found
    if not isinstance(stack, nn.Sequential):
        return []
    counts = Counter(map(stock_type, found))
    return [block for block in found if counts[stock_type(block)] > 1]


def _is_block(module: nn.Module) -> bool:
    """Whether a module may be a block: it has children that compute, and no model or layer inside."""
    parts = list(module.modules())
    settings = settings_of(module)
    is_patched = settings is not None and settings.role not in RUN_BY_PLANS
    if len(parts) == 1 or is_patched or isinstance(module, (nn.ModuleList, nn.Sequential)):
        return False
    return not any(isinstance(part, (GradientCheckpointingLayer, PreTrainedModel)) for part in parts)
