"""A layer's tape: its code runs once on a copy of the layer without data, in which the modules that we know are noted.

The attention function is noted through transformers' attention interface, rotary embeddings where the patched attention
finds ours: their stock function looked up among the globals of the layer's file.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..codecs import IDENTITY, Codec
from ..codecs.float8 import Float8
from ..codecs.int_group import IntGroup
from ..models.copies import GlobalsCopy
from ..models.eager_attention import eager_function_of
from ..models.rope import NAME, RotaryMixin, calls_rope, why_stock
from ..modules.adapter import AdapterMixin
from ..modules.attention import AttentionMixin
from ..modules.base import HOOKS, PatchedModule, is_sharded, settings_of, stock_type, unpatch_instance
from ..modules.gated_mlp import FusedGatedMLPMixin, SplitGatedMLPMixin, T5GatedMLPMixin
from ..modules.leaves import ActivationMixin, DropoutMixin, LayerNormMixin, LinearMixin, RMSNormMixin
from ..modules.recomputed import RecomputedMixin
from ..private_apis import FakeTensor, without_dispatch_modes
from .calls import BATCH, RULES, SOURCES, TOKENS
from .operations import LayerNorm, Linear, RMSNorm
from .own_attention import AttentionCode
from .own_code import OwnCode, Recomputed
from .pointwise import Activation, Dropout, Rope
from .recorder import Recorder, with_gated_products
from .refusal import NotStraight
from .step import Operation
from .tape import Attend, Given, Tape

_SPY = "hf_actcompress_recorder"
# roles of layers as a whole
OF_LAYERS = ("layer", "checkpoint_input")
# arguments of decoders: what the encoder has found, and which of it is padding
_SOURCES, _SOURCE_MASK = "encoder_hidden_states", "encoder_attention_mask"
# arguments that are caches of keys and values
CACHES = ("past_key_values", "layer_past")
# patched modules whose stock code is recorded
_OWN_CODE = (AttentionMixin, SplitGatedMLPMixin, FusedGatedMLPMixin, T5GatedMLPMixin, AdapterMixin)
# of a config: what is being recorded of the module that it belongs to
_RECORDING = "actcompress_recording"


def tape_of(layer: nn.Module, autocast: torch.dtype | None) -> Tape:
    """What the layer does with [B, T, C] in training, under autocast to that dtype or without.

    Raises:
        NotStraight: It cannot be written down.
    """
    with without_dispatch_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        recorder = Recorder(RULES, autocast)
        twin, parameters = _without_data(layer, recorder)
        mask = torch.empty(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool, device="meta")
        others = further_arguments(layer, TOKENS, SOURCES, partial(_empty, _dtype(layer)))
        masks = {id(mask): "attention_mask", id(others.get(_SOURCE_MASK)): _SOURCE_MASK}
        for name, module in list(twin.named_modules()):
            _watch(name, module, recorder, masks)
            if name:
                module.forward = partial(recorder.within, name, module.forward)  # type: ignore[method-assign]
        dtype = _dtype(layer)
        x = torch.empty(BATCH, TOKENS, _width(layer), dtype=dtype, device="meta")
        # of each row its own, as packed rows have them; one for all rows does as well
        angles = [torch.empty(BATCH, TOKENS, head_width(layer), dtype=dtype, device="meta") for _ in range(2)]
        inputs = {name: recorder.given(value) for name, value in zip(("x", "cos", "sin"), (x, *angles), strict=True)}
        inputs.update({name: recorder.given(value) for name, value in others.items() if name != _SOURCE_MASK})
        known = {name: recorder.given(value) for name, value in parameters.items()}
        try:
            with recorder:
                result = twin.forward(x, **arguments(layer, mask, (angles[0], angles[1])), **others)
        finally:
            for module in twin.modules():
                vars(module).pop("forward", None)
        found, tail = (result[0], tuple(result[1:])) if isinstance(result, tuple) else (result, None)
        if tail is not None:
            tail = tuple(None if item is None else _returned(item, inputs, recorder) for item in tail)
        entries = with_gated_products(recorder.entries)
        tape = Tape(inputs, known, entries, recorder.value(found), tail, recorder.metas)
        if not tape.lossless and any(isinstance(entry, Attend) and entry.own is not None for entry in entries):
            raise NotStraight("its attention runs again in backward, out of what linear layers return")
        return tape


def arguments(layer: nn.Module, mask: Tensor | None, angles: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """What a layer's forward takes beside its input, as the models hand it to their layers."""
    known = {
        "attention_mask": mask,
        "position_embeddings": angles,
        "alibi": None,
        **dict.fromkeys(CACHES),
        "use_cache": False,
    }
    names = _names(stock_type(layer).forward)
    if "kwargs" in names:
        # it hands them on to the modules that it consists of
        names = names.union(*(_names(stock_type(child).forward) for child in layer.children()))
    return {name: value for name, value in known.items() if name in names}


def further_arguments(
    layer: nn.Module, tokens: int, sources: int, make: Callable[[tuple[int, ...], type], Tensor]
) -> dict[str, Tensor]:
    """What T5's layers take, too: position biases, and what the encoder has found.

    Args:
        layer: That takes them, perhaps.
        tokens, sources: Of the decoder and the encoder.
        make: A tensor of a shape, of floats or of bools.
    """
    if "position_bias" not in _names(stock_type(layer).forward):
        return {}
    heads, width = _config(layer).num_attention_heads, _width(layer)
    found = {"position_bias": make((1, heads, tokens, tokens), float)}
    if getattr(layer, "is_decoder", False):
        found[_SOURCES] = make((-1, sources, width), float)
        found[_SOURCE_MASK] = make((-1, 1, 1, sources), bool)
        found["encoder_decoder_position_bias"] = make((1, heads, tokens, sources), float)
    return found


def _empty(dtype: torch.dtype, shape: tuple[int, ...], kind: type) -> Tensor:
    sizes = [BATCH if size == -1 else size for size in shape]
    return torch.empty(sizes, dtype=torch.bool if kind is bool else dtype, device="meta")


def _returned(item: Any, inputs: dict[str, int], recorder: Recorder) -> Given:
    """What a layer hands on of what it has been given."""
    names = {value: name for name, value in inputs.items()}
    if not isinstance(item, Tensor) or recorder.value(item) not in names:
        raise NotStraight("it returns more than a tensor")
    return Given(names[recorder.value(item)])


def _names(forward: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(inspect.unwrap(forward)).parameters)


def _without_data(layer: nn.Module, recorder: Recorder) -> tuple[nn.Module, dict[str, Tensor]]:
    """A copy of the layer with weights without data, and these by name."""
    if is_sharded(layer):
        raise NotStraight("it is sharded")
    memo: dict[int, Any] = {}
    for module in layer.modules():
        memo.update((id(v), v) for v in vars(module).values() if isinstance(v, PretrainedConfig))
    for tensor in (*layer.parameters(), *layer.buffers()):
        if type(tensor) not in (Tensor, nn.Parameter, FakeTensor):
            raise NotStraight(f"it has a {type(tensor).__name__} as a weight")
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
    # `from_pretrained` returns models in eval mode, and patch_model comes before the trainer's call of train()
    twin = copy.deepcopy(layer, memo).train()
    if any(True for _ in twin.buffers()):
        raise NotStraight("it has buffers")
    for module in twin.modules():
        for hooks in HOOKS:
            # who has put them there wants to see the model run, not us
            vars(module)[hooks] = OrderedDict()
    return twin, dict(twin.named_parameters())


def _watch(name: str, module: nn.Module, recorder: Recorder, masks: dict[int, str]) -> None:
    """Let the recorder note a module as a whole, or its own code."""
    settings = settings_of(module)
    of_layer = settings is not None and settings.role in OF_LAYERS
    if (
        settings is not None
        and not of_layer
        and (settings.keeps in ("output", "recomputed") or not _is_known(settings.codec))
    ):
        raise NotStraight("it keeps something in a way that programs do not know")
    if "forward" in vars(module):
        raise NotStraight(f"{name} has a forward of its own")
    if of_layer:
        # it runs as programs already, under another autocast, or is told how to keep its input
        unpatch_instance(module)  # type: ignore[arg-type]
        return
    if isinstance(module, AttentionMixin) or _calls_eager(module):
        _watch_attention(name, module, recorder, masks)
    elif isinstance(module, _OWN_CODE):
        unpatch_instance(module)
    elif isinstance(module, PatchedModule) and settings is not None:
        operation = _operation(module)
        if operation is None:
            raise NotStraight(f"{name} is patched in a way that programs do not know ({settings.role})")
        module.forward = partial(_noted, recorder, module, operation, module.stock_forward())  # type: ignore[method-assign]


def _is_known(codec: Codec) -> bool:
    """Whether a codec gives the same for the same activation, whoever asks."""
    return codec == IDENTITY or (type(codec) is IntGroup and codec.rounding == "nearest") or type(codec) is Float8


def _calls_eager(module: nn.Module) -> bool:
    """Whether it calls its file's eager function, and keeps what that keeps or runs again in backward."""
    config = vars(module).get("config")
    if isinstance(module, AttentionMixin) or getattr(config, "_attn_implementation", None) != "eager":
        return False
    code = getattr(inspect.unwrap(stock_type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _watch_attention(name: str, module: Any, recorder: Recorder, masks: dict[int, str]) -> None:
    config = module.__dict__["config"]
    function, settings = sdpa_attention_forward, settings_of(module)
    if not isinstance(module, AttentionMixin):
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
    named.__dict__[_RECORDING] = name, recorder, masks, codec, function
    module.config = named
    if rotates:
        forward = GlobalsCopy(type(module).forward, {NAME: partial(_rotated, recorder)}).copy
        module.forward = partial(forward, module)


def _operation(module: Any) -> Operation | None:
    settings = module.actcompress
    if isinstance(module, LinearMixin):
        return Linear(settings.variant == "transposed")
    if isinstance(module, RMSNormMixin):
        eps_name, _, pairs = settings.options
        return RMSNorm(getattr(module, eps_name), settings.variant) if pairs is None else None
    if isinstance(module, LayerNormMixin):
        return LayerNorm(tuple(module.normalized_shape), module.eps)
    if isinstance(module, ActivationMixin):
        # the module itself, of which a copy without data differs in nothing
        return Activation(module, settings.variant, settings.options) if settings.keeps == "input" else None
    if isinstance(module, RecomputedMixin):
        whole = not module._modules and not module._buffers
        return Recomputed(OwnCode(module)) if whole else None
    return Dropout(module.p) if isinstance(module, DropoutMixin) else None


def _noted(recorder: Recorder, module: Any, operation: Operation, stock: Callable[..., Tensor], x: Tensor) -> Tensor:
    """The forward of a module that is noted as a whole."""
    if isinstance(operation, Dropout) and (operation.p == 0 or not module.training):
        return x
    with recorder.silently():
        # without data there is no autocast, in which a product takes mixed dtypes
        weight = module._parameters.get("weight")
        y = stock(x.to(weight.dtype) if isinstance(operation, Linear) else x)
    if isinstance(operation, Linear) and recorder.autocast is not None:
        y = torch.empty(y.shape, dtype=recorder.autocast, device="meta")
    more = {RMSNorm: 1, LayerNorm: 2, Dropout: 1}.get(type(operation), 0)
    weights: tuple[Tensor | None, ...] = ()
    if isinstance(operation, (Linear, LayerNorm)):
        weights = module._parameters["weight"], module._parameters["bias"]
    elif isinstance(operation, RMSNorm):
        weights = (module._parameters.get("weight"),)
    elif isinstance(operation, Recomputed):
        weights = tuple(w for w in module._parameters.values() if w is not None)
    codec = module.actcompress.codec
    recorder.note(operation, (x, *weights), y, *(torch.empty(0, device="meta") for _ in range(more)), codec=codec)
    return y


def _rotated(
    recorder: Recorder, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    turned = []
    for x in (q, k):
        dtype = torch.promote_types(x.dtype, cos.dtype)
        with recorder.silently():
            y = torch.empty_like(x, dtype=dtype)
        recorder.note(Rope(unsqueeze_dim), (x, cos, sin), y)
        turned.append(y)
    return turned[0], turned[1]


def _attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    name, recorder, masks, codec, function = module.config.__dict__[_RECORDING]  # type: ignore[union-attr]
    kwargs.pop("use_cache", None)
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
    if bias is not None or function is not sdpa_attention_forward:
        own = AttentionCode(function, module, found)
    recorder.entries.append(
        Attend(
            name, ins, recorder.given(heads), found, codec, causal, own=own,
            bias=None if bias is None else recorder.value(bias), mask=masks.get(id(attention_mask), "attention_mask"),
        )
    )  # fmt: skip
    return heads, None


AttentionInterface.register(_SPY, _attention)


def _dtype(layer: nn.Module) -> torch.dtype:
    """That of most weights."""
    sizes: dict[torch.dtype, int] = {}
    for weight in layer.parameters():
        sizes[weight.dtype] = sizes.get(weight.dtype, 0) + weight.numel()
    if not sizes:
        raise NotStraight("it has no weights")
    return max(sizes, key=lambda dtype: sizes[dtype])


def _config(layer: nn.Module) -> Any:
    found = next((m.__dict__["config"] for m in layer.modules() if "config" in m.__dict__), None)
    if found is None:
        raise NotStraight("none of its modules has a config")
    return found


def _width(layer: nn.Module) -> int:
    width = getattr(_config(layer), "hidden_size", None)
    if not isinstance(width, int):
        raise NotStraight("its config names no hidden_size")
    return width


def head_width(layer: nn.Module) -> int:
    """The width of the angles: a head, or the part of it that is rotated."""
    config = next((vars(m)["config"] for m in layer.modules() if "config" in vars(m)), None)
    share = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor") or 1.0
    for module in layer.modules():
        if isinstance(getattr(module, "rotary_ndims", None), int):
            return int(module.rotary_ndims)  # type: ignore[arg-type]
        for name in ("head_dim", "head_size"):
            if isinstance(getattr(module, name, None), int):
                return int(share * getattr(module, name))
    return 2
