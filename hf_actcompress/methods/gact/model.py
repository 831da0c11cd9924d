"""GACT's refresh: how much the gradient suffers from the rounding of each layer's tensors, measured while it trains."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ...codecs.bit_allocation import Sensitivity, allocate
from ...codecs.table import CODECS
from ...config import CompressionConfig
from ...config_checks import CODEC_FIELDS
from ...modules.base import PLAIN_TENSORS, is_sharded
from ...private_apis import FakeTensor, transforms_or_export
from ...records import hooks_outside
from ...reference.rng import Generators
from .codec import IntMeasured, Width

_log = logging.getLogger(__name__)
# bits of a group whose rounding is measured; the effect of other widths is computed from it
_PROBE = 4
# torch's message about a gradient with respect to given tensors through reentrant checkpointing
_REENTRANT = "incompatible with .grad()"


def refresh_bits(
    model: nn.Module, forward: Callable[[], Any], config: CompressionConfig, generators: Generators
) -> None:
    """Measure each width that the model's codecs know, and set all of them so that their mean is the codec's bits.

    On the current batch, this runs one forward and backward without rounding, and one for each layer and role in which
    only that one is rounded. Parameters, their ``.grad``, buffers and the generators stay as they are. Nothing is done
    if the forward returns no loss or is checkpointed in torch's reentrant way, if parameters are sharded, or while a
    report watches what is saved.

    Args:
        model: The PreTrainedModel that is called, in training.
        forward: Its forward on the batch.
        config: What the model was patched with.
        generators: The generators of the patched model.

    Saves:
        Two copies of the gradient while it measures.

    Source:
        GACT (arXiv 2206.11357), which measures each tensor three times: twice with one bit and once with 8.
    """
    widths = {place: width for place, width in generators.learnt.items() if isinstance(width, Width)}
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not widths or not parameters or not _can_be_measured(model, parameters):
        return
    before = {place: width.bits for place, width in widths.items()}
    found: dict[str, Sensitivity] = {}
    try:
        with _buffers_restored(model):
            found = _sensitivities(widths, partial(_gradients, model, forward, parameters, generators))
    except RuntimeError as error:
        if _REENTRANT not in str(error):
            raise
        _say_left(type(model).__name__, "its checkpointing is reentrant (use_reentrant=False can be measured)")
    finally:
        chosen = dict(zip(found, allocate(list(found.values()), mean_bits(config)), strict=True))
        for place, width in widths.items():
            width.bits = chosen.get(place, before[place])


def mean_bits(config: CompressionConfig) -> float:
    """The mean bits that a config asks for: the most bits of its codecs whose bits are measured."""
    codecs = [CODECS[getattr(config, field)] for field in CODEC_FIELDS]
    return max(codec.bits for codec in codecs if isinstance(codec, IntMeasured))


def _can_be_measured(model: nn.Module, parameters: Sequence[Tensor]) -> bool:
    """Whether gradients can be computed here, apart from those of the training step."""
    if not model.training or not torch.is_grad_enabled() or transforms_or_export() or hooks_outside() is not None:
        return False
    plain = all(type(p) in PLAIN_TENSORS and not isinstance(p, FakeTensor) and not p.is_meta for p in parameters)
    return plain and not any(is_sharded(module) for module in model.modules())


def _sensitivities(widths: dict[str, Width], gradients: Callable[[], list[Tensor] | None]) -> dict[str, Sensitivity]:
    """The gradient's relative error from 4 bits at each place that stores something; empty if there is no loss."""
    for width in widths.values():
        width.bits, width.elements = 0, 0
    exact = gradients()
    if exact is None:
        return {}
    norm, found = _norm(exact), {}
    if not norm or not math.isfinite(norm):
        # a batch without a gradient, or with an overflow, teaches nothing
        return {}
    # copied, because the next passes count again; a place without elements did not run (one of two towers)
    elements = {place: width.elements for place, width in widths.items() if width.elements}
    for place, count in elements.items():
        widths[place].bits = _PROBE
        rounded = gradients()
        assert rounded is not None
        widths[place].bits, widths[place].elements = 0, count
        error = _norm([a - b for a, b in zip(rounded, exact, strict=True)]) / norm
        found[place] = Sensitivity(count, error)
    return found


def _gradients(
    model: nn.Module, forward: Callable[[], Any], parameters: Sequence[Tensor], generators: Generators
) -> list[Tensor] | None:
    """The gradient of the loss, with the masks of dropout that the training's own forward is about to draw."""
    devices = {p.device.index or 0 for p in model.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices=devices), generators.undisturbed():
        output = forward()
        loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            _say_left(type(model).__name__, "its forward returns no loss (pass labels to it)")
            return None
        grads = torch.autograd.grad(loss, list(parameters), allow_unused=True)
    return [g for g in grads if g is not None]


def _norm(grads: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(g.float().square().sum()) for g in grads))


@contextmanager
def _buffers_restored(model: nn.Module) -> Iterator[None]:
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


@cache
def _say_left(model: str, reason: str) -> None:
    _log.warning("the bits of %s stay as they are, because nothing can be measured: %s", model, reason)
