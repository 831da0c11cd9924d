"""Whether the programs of a layer compute what the layer computes: a trial on a small layer of the same kind.

The small layer has the layer's structure, dtypes and patches, but few and small weights, with random values. Its tape
must equal the layer's except for sizes; then its programs must give stock's outputs and the leaf path's gradients, bit
by bit, with dropout drawn from the same state, with and without a mask and a cache.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, EncoderDecoderCache

from ..models.probe import same_bits
from ..modules.base import PatchedModule, patch_instance, stock_type, unpatch_instance
from ..modules.checkpoint import CHECKPOINT_FUNCTION
from ..private_apis import FakeTensor, without_dispatch_modes
from ..records import apart, frame
from ..reference.device_rules import under_rules
from ..roles import Role
from .arguments import arguments, cache_names, configs_of, further_arguments, head_width
from .layer import LayerPrograms, LayerSettings, ProgramLayerMixin
from .refusal import NotStraight
from .small import CHECKPOINTED, small_layer, without_dropout
from .tape import Attend, Tape
from .tracing import tape_of

_BATCH, _TOKENS, _SOURCES = 2, 5, 4
# the calls that are tried without autocast, and under it
_CASES: tuple[str, ...] = ("", "mask and a cache")
_AUTOCAST_CASES: tuple[str, ...] = ("mask",)
_CASES_WITHOUT_MASKS = ("", "cache")

# everything that decides the answer -> whether the layer may run as one program, and whether backward may recompute
# that; or why the layer may not run as programs at all
_answers: dict[Hashable, tuple[bool, bool] | str] = {}
_NOT_AGAIN = "it cannot be made again in backward"


def proved(layer: nn.Module, autocast: torch.dtype | None) -> Tape:
    """The tape of a layer under one autocast. Raises NotStraight if it cannot be recorded, or its programs differ."""
    if next(layer.parameters(), None) is None:
        raise NotStraight("it has no weights")
    with _undisturbed(_device(layer), _is_estimated(layer)):
        return _proved(layer, autocast)


def _proved(layer: nn.Module, autocast: torch.dtype | None) -> Tape:
    try:
        tape = tape_of(layer, autocast)
    except NotStraight:
        raise
    except Exception as error:
        raise NotStraight(f"its code cannot be recorded: {type(error).__name__}: {str(error)[:100]}") from error
    weights = tuple((w.dtype, w.requires_grad) for w in layer.parameters())
    key = stock_type(layer), tape.key(sizes=False), weights, _device(layer), autocast, _is_estimated(layer)
    if key not in _answers:
        _answers[key] = _answer(layer, tape, autocast)
    answer = _answers[key]
    if isinstance(answer, str):
        raise NotStraight(answer)
    return replace(tape, whole=answer[0], again=answer[1])


def _device(layer: nn.Module) -> torch.device:
    """The device of the trial: that of the weights, or the CPU if these have no data."""
    weight = next(layer.parameters())
    return torch.device("cpu") if _is_estimated(layer) or weight.device.type == "meta" else weight.device


def _is_estimated(layer: nn.Module) -> bool:
    """Whether its weights are fake, for an estimate. It leaves the generator to a training that may run beside it."""
    return isinstance(next(layer.parameters()), FakeTensor)


def _answer(layer: nn.Module, tape: Tape, autocast: torch.dtype | None) -> tuple[bool, bool] | str:
    try:
        small = small_layer(layer, _device(layer))
        small_tape = tape_of(small, autocast)
    except NotStraight as reason:
        return str(reason)
    except Exception as error:
        return f"a small layer of its kind cannot be recorded: {type(error).__name__}: {str(error)[:100]}"
    if small_tape.key(sizes=False) != tape.key(sizes=False):
        return "a small layer of its kind does something else than it"
    if _is_estimated(layer):
        small = without_dropout(small)
        small_tape = tape_of(small, autocast)
    found = _difference(small, small_tape, autocast)
    if found is not None and found.startswith(_NOT_AGAIN):
        # The code that runs again in backward computes only what backward reads. If this leaves a dropout out, the
        # dropouts after it draw other numbers than in the forward. So such a layer runs without programs where it is
        # checkpointed.
        found = _difference(small, replace(small_tape, again=False), autocast)
        again = False
    else:
        again = True
    if found is None:
        return True, again
    if any(isinstance(entry, Attend) and entry.own is not None for entry in small_tape.entries):
        # cut into parts, the layer would call the function that the config names instead
        return found
    # torch's own call of the kernel may do more than ours: try the layer cut at its attention
    return _difference(small, replace(small_tape, whole=False), autocast) or (False, False)


@contextmanager
def _undisturbed(device: torch.device, estimated: bool) -> Iterator[None]:
    """Gradients on, autocast off, generators the same after it as before. Modes and hooks from outside see nothing."""
    devices = [] if device.type == "cpu" else [device]
    forked = torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type)
    with (
        without_dispatch_modes(),
        apart(),
        under_rules(None),
        saved_tensors_hooks(Tensor.detach, lambda x: x),
        nullcontext() if estimated else forked,
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        yield


def _difference(leaves: nn.Module, tape: Tape, autocast: torch.dtype | None) -> str | None:
    """Where the results of stock, the leaf path and the programs differ; None if they are the same."""
    stock, programs = _unpatched(_share(leaves)), _share(leaves)
    made = LayerPrograms.of(programs, tape, autocast, proved)
    patch_instance(programs, ProgramLayerMixin, LayerSettings(Role.LAYER, "program", programs=made))
    cases = _CASES if autocast is None else _AUTOCAST_CASES
    if tape.calls_another:
        # we do not know which masks the attention function takes; it gets the mask that the layer is given
        cases = _CASES_WITHOUT_MASKS
    for calls, case in enumerate(cases, 1):
        try:
            expected, by_leaf, found = (_step(m, tape, case, autocast) for m in (stock, leaves, programs))
        except Exception as error:
            return f"it cannot be tried: {type(error).__name__}: {str(error)[:100]}"
        if not same_bits(found[0], expected[0]):
            return f"its forward is not what has been recorded of it (found by a numeric probe{_of(case)})"
        if not all(map(same_bits, found, by_leaf)):
            return f"its gradients are not those of its parts (found by a numeric probe{_of(case)})"
        if made.calls != calls:
            return f"its calls are not ordinary ones{_of(case)}"
        if tape.whole and tape.again and tape.lossless and "cache" not in case:
            vars(programs).update({CHECKPOINTED: True, CHECKPOINT_FUNCTION: partial(checkpoint, use_reentrant=False)})
            found = _step(programs, tape, case, autocast)
            if not all(map(same_bits, found, by_leaf)) or made.calls != calls + 1:
                return f"{_NOT_AGAIN}{_of(case)}"
            made.calls -= 1
            vars(programs).pop(CHECKPOINTED)
    return None


def _of(case: str) -> str:
    return f", with a {case}" if case else ""


def _share(layer: nn.Module) -> nn.Module:
    """A copy that shares the weights."""
    return copy.deepcopy(layer, {**configs_of(layer), **{id(w): w for w in layer.parameters()}})


def _unpatched(layer: nn.Module) -> nn.Module:
    for module in list(layer.modules()):
        if isinstance(module, PatchedModule):
            unpatch_instance(module)  # type: ignore[arg-type]
    return layer


def _step(layer: nn.Module, tape: Tape, case: str, autocast: torch.dtype | None) -> list[Tensor]:
    """The output, and the gradients of the input and all parameters that want one."""
    meta = tape.metas[tape.inputs["x"]]
    generator = torch.Generator().manual_seed(1)
    device = next(layer.parameters()).device

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device="cpu").to(device, meta.dtype)

    def make(shape: tuple[int, ...], kind: type) -> Tensor:
        values = normal(*(_BATCH if size == -1 else size for size in shape))
        return values > -1 if kind is bool else values.requires_grad_()

    x = normal(_BATCH, _TOKENS, meta.size(-1)).requires_grad_()
    width = head_width(layer)
    angles = normal(_BATCH if case else 1, _TOKENS, (width + 1) // 2).repeat(1, 1, 2)[..., :width]
    kwargs = arguments(layer, _mask(device) if "mask" in case else None, (angles.cos(), angles.sin()))
    others = further_arguments(layer, _TOKENS, _SOURCES, make)
    if case == "":
        # without position biases the layer makes them itself
        others = {name: value for name, value in others.items() if "bias" not in name}
    kwargs.update(others)
    if "cache" in case:
        both = "encoder_hidden_states" in others
        new = EncoderDecoderCache(DynamicCache(), DynamicCache()) if both else DynamicCache()
        kwargs.update(dict.fromkeys(cache_names(layer), new))
    if tape.draws():
        torch.manual_seed(3)
    with frame(), torch.autocast(device.type, autocast, enabled=autocast is not None):
        y = layer(x, **kwargs)
    y = y[0] if isinstance(y, tuple) else y
    wanted = [x, *(t for t in others.values() if t.requires_grad), *(w for w in layer.parameters() if w.requires_grad)]
    dy = normal(*y.shape).to(y.dtype)
    grads = torch.autograd.grad(y, wanted, dy, allow_unused=True)
    return [y.detach(), *(x.new_zeros(0) if g is None else g for g in grads)]


def _mask(device: torch.device) -> Tensor:
    mask = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool).tril().expand(_BATCH, 1, -1, -1).clone()
    mask[1, :, :, 0] = False
    mask[1, :, 0, 0] = True
    return mask.to(device)
