"""Rules for torch calls, by the name of the function. Each notes the operation that a call stands for, or refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Size, Tensor

from .arithmetic import Add, Cast, Cat, Mul, Neg, Repeat, Scale, Slice, Split, Stack, Unbind
from .broadcast import Expand
from .own_attention import AttentionCode, direct_attention
from .pointwise import Dropout
from .recorder import Recorder
from .refusal import NotStraight
from .shapes import Contiguous, Permute, Reshape, Tokens
from .tape import Attend

# the numbers of rows and of tokens per row while a layer is recorded: primes that are no size of any model
BATCH, TOKENS = 1013, 10007
# the number of an encoder's tokens
SOURCES = 10009


def _add(r: Recorder, y: Tensor, a: Any, b: Any) -> None:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or not a.shape == b.shape:
        raise NotStraight("it adds something that is no tensor of the same shape")
    r.note(Add(), (a, b), y)


def _add_in_place(r: Recorder, y: Tensor, a: Tensor, b: Any) -> None:
    if not r.is_unread(a) or not isinstance(b, Tensor) or torch.promote_types(a.dtype, b.dtype) != a.dtype:
        raise NotStraight("it writes on a tensor that somebody else reads")
    _add(r, y, a, b)


def _mul(r: Recorder, y: Tensor, a: Any, b: Any) -> None:
    if isinstance(a, Number):
        a, b = b, a
    if isinstance(b, Number):
        r.note(Scale(float(b)), (a,), y)  # type: ignore[arg-type]
    elif isinstance(a, Tensor) and isinstance(b, Tensor) and y.shape in (a.shape, b.shape):
        r.note(Mul(), (a, b) if y.shape == a.shape else (b, a), y)
    else:
        raise NotStraight("it multiplies tensors of different shapes")


def _neg(r: Recorder, y: Tensor, x: Tensor) -> None:
    r.note(Neg(), (x,), y)


def _reshape(r: Recorder, y: Tensor, x: Tensor, *_: Any, **__: Any) -> None:
    if y.shape == (BATCH * TOKENS, *x.shape[2:]) and x.dim() == 3:
        # operations that work row by row compute the same on both shapes
        r.same(y, x)
        r.flat.add(r.value(x))
    elif x.dim() == 2 and r.value(x) in r.flat and y.shape == (BATCH, TOKENS, x.size(1)):
        r.same(y, x)
    elif x.shape[0] == BATCH * TOKENS and y.shape[:2] == (BATCH, TOKENS):
        # the sizes of batch and tokens are read off the layer's input
        r.note(Tokens(tuple(y.shape[2:])), (x, r.metas[0]), y)
    elif y.shape == x.shape:
        r.same(y, x)
    else:
        r.note(Reshape(sizes_of(y.shape, x.shape), sizes_of(x.shape, y.shape)), (x,), y)


def sizes_of(shape: Size, source: Size) -> tuple[int, ...]:
    """A shape as `reshaped` takes it: sizes of batch and tokens become -1, or refer to a dimension of `source`."""
    sizes = []
    for size in shape:
        if size in (BATCH, TOKENS, SOURCES) and size in source:
            sizes.append(-2 - source.index(size))
        else:
            sizes.append(-1 if any(size % rows == 0 for rows in (BATCH, TOKENS, SOURCES)) else size)
    if sizes.count(-1) > 1:
        raise NotStraight("it reshapes batch and tokens in a way that is not known")
    return tuple(sizes)


def _permute(r: Recorder, y: Tensor, x: Tensor, *dims: Any) -> None:
    wanted = dims[0] if isinstance(dims[0], (tuple, list)) else dims
    _permuted(r, y, x, tuple(dim % x.dim() for dim in wanted))


def _transpose(r: Recorder, y: Tensor, x: Tensor, first: int, second: int) -> None:
    order = list(range(x.dim()))
    order[first], order[second] = order[second], order[first]
    _permuted(r, y, x, tuple(order))


def _permuted(r: Recorder, y: Tensor, x: Tensor, order: tuple[int, ...]) -> None:
    before = r.maker(x)
    of = before.operation.order if before is not None and isinstance(before.operation, Permute) else None
    if of is not None and tuple(of[dim] for dim in order) == tuple(range(len(order))):
        r.known_as(y, before.ins[0])  # type: ignore[union-attr, arg-type]
    else:
        r.note(Permute(order), (x,), y)


def _contiguous(r: Recorder, y: Tensor, x: Tensor) -> None:
    if y is not x:
        r.note(Contiguous(), (x,), y)


def _split(r: Recorder, y: Sequence[Tensor], x: Tensor, _: Any, dim: int = 0) -> None:
    if dim % x.dim() in (0, 1) and x.dim() == 3:
        raise NotStraight("it splits batch or tokens")
    r.note(Split(tuple(part.size(dim) for part in y), dim), (x,), *y)


def _unbind(r: Recorder, y: Sequence[Tensor], x: Tensor, dim: int = 0) -> None:
    r.note(Unbind(len(y), dim % x.dim()), (x,), *y)


def _item(r: Recorder, y: Any, x: Tensor, index: Any) -> None:
    taken = index if isinstance(index, tuple) else (index,)
    if Ellipsis in taken:
        place = taken.index(Ellipsis)
        taken = (*taken[:place], *[slice(None)] * (x.dim() - len(taken) + 1), *taken[place + 1 :])
    parts = [(dim - x.dim(), part) for dim, part in enumerate(taken) if not _is_whole(part)]
    if len(parts) != 1 or not isinstance(y, Tensor):
        raise NotStraight("it takes a part of a tensor that is no part of one dimension")
    ((dim, part),) = parts
    size = x.size(dim)
    if size in (BATCH, TOKENS, SOURCES, BATCH * TOKENS):
        raise NotStraight("it takes a part of the batch or of the tokens")
    if isinstance(part, slice):
        start, end, step = part.indices(size)
        if step > 1 and dim != -1:
            raise NotStraight("it takes each second part of a dimension that is not the last")
        r.note(Slice(start, end, size, step, dim), (x,), y)
        return
    # the index [i] keeps the dimension and copies; the index i drops the dimension
    (start,) = part if isinstance(part, list) and len(part) == 1 else (part,)
    if type(start) is not int:
        raise NotStraight("it takes parts of a tensor by their numbers")
    start %= size
    one = x.narrow(dim, start, 1)
    r.note(Slice(start, start + 1, size, 1, dim), (x,), one)
    if isinstance(part, list):
        r.note(Contiguous(), (one,), y)
    else:
        _reshape(r, y, one)


def _is_whole(part: Any) -> bool:
    return isinstance(part, slice) and part == slice(None)


def _expand(r: Recorder, y: Tensor, x: Tensor, *_: Any) -> None:
    changed = [dim - x.dim() for dim in range(x.dim()) if y.size(dim - x.dim()) != x.size(dim)]
    if y.shape == x.shape:
        r.same(y, x)
    elif y.dim() == x.dim() and len(changed) == 1:
        r.note(Expand(changed[0], y.size(changed[0])), (x,), y)
    else:
        raise NotStraight("it repeats a tensor along more than one dimension")


def _cat(r: Recorder, y: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> None:
    if dim % y.dim() != y.dim() - 1:
        raise NotStraight("it joins tensors along another dimension than their last")
    r.note(Cat(tuple(x.size(-1) for x in tensors)), tuple(tensors), y)


def _stack(r: Recorder, y: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> None:
    if dim % y.dim() != y.dim() - 1:
        raise NotStraight("it stacks tensors along another dimension than a new last one")
    r.note(Stack(), tuple(tensors), y)


def _repeat(r: Recorder, y: Tensor, x: Tensor, repeats: int, dim: int | None = None) -> None:
    if not isinstance(repeats, int) or dim is None or dim % x.dim() != x.dim() - 1:
        raise NotStraight("it repeats a tensor in another way than along its last dimension")
    r.note(Repeat(repeats), (x,), y)


def _cast(r: Recorder, y: Tensor, x: Tensor, *_: Any, **__: Any) -> None:
    if y.dtype == x.dtype:
        r.same(y, x)
    else:
        r.note(Cast(y.dtype), (x,), y)


def _dropout(r: Recorder, y: Tensor, input: Tensor, p: float = 0.5, training: bool = True, **_: Any) -> None:
    if not training or p == 0:
        r.same(y, input)
    else:
        r.note(Dropout(p), (input,), y, torch.empty(0, device="meta"))


def _attend(
    r: Recorder, y: Tensor, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, **options: Any,
) -> None:  # fmt: skip
    """torch's attention, called by a layer's code directly instead of through transformers' interface."""
    if id(attn_mask) not in r.masks or is_causal:
        raise NotStraight("its attention has a mask of its own making")
    if y.dim() != 4:
        raise NotStraight("its attention is not one of heads [B, H, T, D]")
    given = tuple((key, value) for key, value in options.items() if value not in (None, False))
    keywords = (("dropout", dropout_p), *given) if dropout_p else given
    heads = torch.empty(y.size(0), y.size(2), y.size(1), y.size(3), dtype=r.autocast or v.dtype, device="meta")
    ins = r.value(q), r.value(k), r.value(v)
    own = AttentionCode(direct_attention, r.modules[r.module], keywords)
    r.entries.append(Attend(r.module, ins, r.given(heads), keywords, own=own, mask=r.masks[id(attn_mask)]))
    r.note(Permute((0, 2, 1, 3)), (heads,), y)


CALLS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("add", "__add__", "__radd__"), _add),
    **dict.fromkeys(("__iadd__", "add_"), _add_in_place),
    **dict.fromkeys(("expand", "broadcast_to"), _expand),
    "scaled_dot_product_attention": _attend,
    **dict.fromkeys(("mul", "__mul__", "__rmul__", "multiply"), _mul),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze"), _reshape),
    "permute": _permute,
    **dict.fromkeys(("transpose", "swapaxes"), _transpose),
    "contiguous": _contiguous,
    "unbind": _unbind,
    **dict.fromkeys(("neg", "__neg__"), _neg),
    **dict.fromkeys(("split", "chunk"), _split),
    "__getitem__": _item,
    **dict.fromkeys(("cat", "concat"), _cat),
    "stack": _stack,
    "repeat_interleave": _repeat,
    **dict.fromkeys(("to", "float", "type", "half", "bfloat16"), _cast),
    "dropout": _dropout,
}
