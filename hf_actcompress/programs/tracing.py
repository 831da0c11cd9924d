"""A layer's tape: the layer's code runs once on a copy of the layer without data, and known modules in it are noted.

The attention function is noted through transformers' attention interface. Rotary embeddings are noted in place of the
stock function that the attention's code looks up in its globals, where patched attention puts our function.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..codecs import IDENTITY, packs_alike
from ..models.eager_attention import eager_function_of
from ..models.function_copies import GlobalsCopy
from ..models.rope import NAME, RotaryMixin, calls_rope, why_stock
from ..models.source import names_in
from ..modules.adapter import AdapterMixin
from ..modules.attention import AttentionMixin
from ..modules.base import HOOKS, PatchedModule, is_sharded, settings_of, stock_type, unpatch_instance
from ..modules.leaves import OwnLinearMixin
from ..modules.selective import SelectiveMixin
from ..modules.tiled import TiledMixin
from ..private_apis import FakeTensor, without_dispatch_modes
from ..roles import Role
from .arguments import ENCODED_MASK, arguments, configs_of, dtype_of, further_arguments, head_width, width_of
from .calls import BATCH, CALLS, SOURCES, TOKENS
from .dora import dora, is_dora
from .interfaces import calls_another, handed_in, handed_on, interface_name
from .noting import noted, operation_of, product, rotated
from .own_attention import AttentionCode
from .recorder import Recorder, with_gated_products, with_splits
from .refusal import NotStraight
from .tape import Attend, Given, Tape

_SPY = "hf_actcompress_recorder"
# roles of layers as a whole
OF_LAYERS = (Role.LAYER, Role.CHECKPOINT_INPUT)
# patched modules whose stock code is recorded
_OWN_CODE = (AttentionMixin, TiledMixin, AdapterMixin)
_AGAIN = "its attention runs again in backward, out of what linear layers return"
# the attribute of a config that holds the recorder of its module
_RECORDING = "actcompress_recording"


def tape_of(layer: nn.Module, autocast: torch.dtype | None) -> Tape:
    """The tape of the layer in training on [B, T, C], under autocast to that dtype, or without autocast (None).

    Raises:
        NotStraight: It cannot be written down.
    """
    with without_dispatch_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        recorder = Recorder(CALLS, autocast)
        twin, parameters = _without_data(layer, recorder)
        mask = torch.empty(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool, device="meta")
        others = further_arguments(layer, TOKENS, SOURCES, partial(_empty, dtype_of(layer)))
        masks = recorder.masks
        masks[id(mask)] = "attention_mask"
        if ENCODED_MASK in others:
            masks[id(others[ENCODED_MASK])] = ENCODED_MASK
        recorder.modules = dict(twin.named_modules())
        for name, module in recorder.modules.items():
            _watch(name, module, recorder)
            if name:
                module.forward = partial(recorder.within, name, module.forward)  # type: ignore[method-assign]
        dtype = dtype_of(layer)
        x = torch.empty(BATCH, TOKENS, width_of(layer), dtype=dtype, device="meta")
        # angles for each row, as packed rows have them; the tape holds for angles that all rows share, too
        angles = [torch.empty(BATCH, TOKENS, head_width(layer), dtype=dtype, device="meta") for _ in range(2)]
        inputs = {name: recorder.given(value) for name, value in zip(("x", "cos", "sin"), (x, *angles), strict=True)}
        inputs.update({name: recorder.given(value) for name, value in others.items() if name != ENCODED_MASK})
        known = {name: recorder.given(value) for name, value in parameters.items()}
        handed = handed_on(layer)
        recorder.handed = {id(value): name for name, value in handed.items()}
        try:
            with recorder:
                result = twin.forward(x, **{**arguments(layer, mask, (angles[0], angles[1])), **others, **handed})
        finally:
            for module in twin.modules():
                vars(module).pop("forward", None)
        found, tail = (result[0], tuple(result[1:])) if isinstance(result, tuple) else (result, None)
        if tail is not None:
            tail = tuple(None if item is None else _returned(item, inputs, recorder) for item in tail)
        entries = with_splits(with_gated_products(recorder.entries))
        tape = Tape(inputs, known, entries, recorder.value(found), tail, recorder.metas)
        attends = [entry for entry in entries if isinstance(entry, Attend)]
        if not tape.lossless and any(attend.own is not None or attend.handed is not None for attend in attends):
            raise NotStraight(_AGAIN)
        return tape


def _empty(dtype: torch.dtype, shape: tuple[int, ...], kind: type) -> Tensor:
    sizes = [BATCH if size == -1 else size for size in shape]
    return torch.empty(sizes, dtype=torch.bool if kind is bool else dtype, device="meta")


def _returned(item: Any, inputs: dict[str, int], recorder: Recorder) -> Given:
    """An item of the tuple that the layer returns, as the layer's argument that it is."""
    names = {value: name for name, value in inputs.items()}
    if not isinstance(item, Tensor) or recorder.value(item) not in names:
        raise NotStraight("it returns more than a tensor")
    return Given(names[recorder.value(item)])


def _without_data(layer: nn.Module, recorder: Recorder) -> tuple[nn.Module, dict[str, Tensor]]:
    """A copy of the layer with weights without data, and these by name."""
    if is_sharded(layer) and not all(type(p) is nn.Parameter and not hasattr(p, "ds_id") for p in layer.parameters()):
        # FSDP2 has plain weights while the layer runs
        raise NotStraight("it is sharded")
    if any(True for _ in layer.buffers()):
        raise NotStraight("it has buffers")
    memo = configs_of(layer)
    for module in layer.modules():
        # hooks are there to see the model run, not this recording
        memo.update((id(vars(module)[hooks]), OrderedDict()) for hooks in HOOKS)
    for tensor in (*layer.parameters(), *layer.buffers()):
        if type(tensor) not in (Tensor, nn.Parameter, FakeTensor):
            raise NotStraight(f"it has a {type(tensor).__name__} as a weight")
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
    # `from_pretrained` returns models in eval mode, and patch_model comes before the trainer's call of train()
    twin = _copied(layer, memo).train()
    return twin, dict(twin.named_parameters())


def _copied(layer: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy, also of a layer that FSDP2 shards, whose class and state refuse to be copied."""
    # what `module.compile()` and a report of kept tensors put in place of the call belongs to the layer alone
    kind, state = type(layer), {name: value for name, value in vars(layer).items() if name != "_compiled_call_impl"}
    if _refuses_copies(layer):
        # in the MRO, the class that FSDP2 made and FSDPModule come before the layer's own class
        kind = kind.__mro__[2]
        state = {name: value for name, value in state.items() if not name.startswith("__composable_api")}
    if any(_refuses_copies(module) for module in layer.modules() if module is not layer):
        raise NotStraight("a module inside of it is sharded")
    twin: nn.Module = kind.__new__(kind)
    memo[id(layer)] = twin
    vars(twin).update(copy.deepcopy(state, memo))
    return twin


def _refuses_copies(module: nn.Module) -> bool:
    return is_sharded(module) and "__deepcopy__" in vars(type(module))


def _watch(name: str, module: nn.Module, recorder: Recorder) -> None:
    """Let the recorder note a module as a whole, or the calls in its code."""
    settings = settings_of(module)
    of_layer = settings is not None and settings.role in OF_LAYERS
    if (
        settings is not None
        and not of_layer
        and (settings.keeps in ("output", "recomputed") or not packs_alike(settings.codec))
    ):
        raise NotStraight("it keeps something in a way that programs do not know")
    if "forward" in vars(module):
        raise NotStraight(f"{name} has a forward of its own")
    if of_layer:
        # the layer runs as programs under another autocast already, or has settings for its checkpointed input
        unpatch_instance(module)  # type: ignore[arg-type]
        return
    if isinstance(module, AttentionMixin) or calls_eager(module) or calls_another(module):
        _watch_attention(name, module, recorder)
    elif is_dora(module):
        module.forward = partial(dora, recorder, module)  # type: ignore[method-assign]
    elif isinstance(module, SelectiveMixin) or settings is None:
        _watch_own_code(module, recorder)
    elif isinstance(module, OwnLinearMixin):
        module.forward = partial(product, recorder, module)  # type: ignore[method-assign]
    elif isinstance(module, _OWN_CODE):
        unpatch_instance(module)
    elif isinstance(module, PatchedModule) and settings is not None:
        operation = operation_of(module)
        if operation is None:
            raise NotStraight(f"{name} is patched in a way that programs do not know ({settings.role})")
        module.forward = partial(noted, recorder, module, operation, module.stock_forward())  # type: ignore[method-assign]


def calls_eager(module: nn.Module) -> bool:
    """Whether a module calls its file's eager attention, and so keeps what this saves, or runs again in backward."""
    return not isinstance(module, AttentionMixin) and interface_name(module) == "eager"


def _watch_attention(name: str, module: Any, recorder: Recorder) -> None:
    config = module.__dict__["config"]
    function, settings = sdpa_attention_forward, settings_of(module)
    if calls_another(module):
        function = None  # type: ignore[assignment]
    elif not isinstance(module, AttentionMixin):
        function = eager_function_of(stock_type(module))  # type: ignore[assignment]
        if function is None:
            raise NotStraight("its attention is of its own making")
    elif config._attn_implementation != "sdpa":
        raise NotStraight(f"its attention is {config._attn_implementation}")
    codec = IDENTITY if settings is None else settings.codec
    rotates = isinstance(module, RotaryMixin) and calls_rope(module.stock_class) and not why_stock(module.stock_class)
    if settings is not None:
        unpatch_instance(module)
    named = copy.copy(config)
    named.__dict__["_attn_implementation_internal"] = _SPY
    named.__dict__[_RECORDING] = name, recorder, codec, function
    module.config = named
    if rotates:
        _watch_angles(module, recorder)


def _watch_own_code(module: Any, recorder: Recorder) -> None:
    """Watch attention that does not use transformers' interface, and all other code."""
    if isinstance(module, SelectiveMixin):
        if module.actcompress is not None and module.actcompress.codec != IDENTITY:
            raise NotStraight(_AGAIN)
        unpatch_instance(module)
    kind = type(module)
    if "scaled_dot_product_attention" in names_in(module) and calls_rope(kind) and why_stock(kind) is None:
        _watch_angles(module, recorder)


def _watch_angles(module: Any, recorder: Recorder) -> None:
    """Let the recorder note rotary embeddings as a whole."""
    forward = GlobalsCopy(type(module).forward, {NAME: partial(rotated, recorder)}).copy
    module.forward = partial(forward, module)


def _attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    name, recorder, codec, function = module.config.__dict__[_RECORDING]  # type: ignore[union-attr]
    handed = handed_in(kwargs, recorder.handed) if function is None else None
    kwargs = {word: value for word, value in kwargs.items() if word != "use_cache" and id(value) not in recorder.handed}
    bias = kwargs.pop("position_bias", None)
    if any(isinstance(value, Tensor) for value in kwargs.values()):
        raise NotStraight("its attention is called with further tensors")
    dtype = recorder.autocast or v.dtype
    heads = torch.empty(q.size(0), q.size(2), q.size(1), v.size(3), dtype=dtype, device="meta")
    ins = recorder.value(q), recorder.value(k), recorder.value(v)
    found = tuple((keyword, value) for keyword, value in kwargs.items() if value is not None)
    asked = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if asked is None else asked)
    own = None
    if bias is not None and handed is not None:
        raise NotStraight(f"its attention ({module.config._attn_implementation}) takes a position bias")  # type: ignore[union-attr]
    if handed is None and (bias is not None or function is not sdpa_attention_forward):
        own = AttentionCode(function, module, found)
    recorder.entries.append(
        Attend(
            name, ins, recorder.given(heads), found, codec, causal, own=own,
            bias=None if bias is None else recorder.value(bias),
            mask=recorder.masks.get(id(attention_mask), "attention_mask"), handed=handed,
        )
    )  # fmt: skip
    return heads, None


AttentionInterface.register(_SPY, _attention)
