"""Which functions of torch have another implementation for logits that left their model (`row_functions`).

Each function here takes the arguments of the torch function that it replaces, and returns NotImplemented for calls that
it does not support.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..private_apis import transforms_or_export, without_torch_function
from ..reference.device_rules import on_cpu
from .deferred_logits import DeferredLogits, plain
from .logits_gradient import dense
from .loss_arguments import LossArguments, loss_dtypes, loss_over_classes, reduced
from .row_functions import map_rows, multiply_rows, reduce_rows


def _fits(x: Any, dim: Any = -1) -> bool:
    """Whether x are deferred logits that were not modified in place, and `dim` is the dimension of the vocabulary."""
    if not isinstance(x, DeferredLogits) or transforms_or_export():
        return False
    return x.dim() > 1 and x.size(-1) > 1 and x.numel() > 0 and dim in (-1, x.dim() - 1) and not x.chain.written()


def _softmax_like(name: str, function: Callable[..., Tensor]) -> Callable[..., Any]:
    def of(input: Any, dim: Any = None, *rest: Any, dtype: torch.dtype | None = None, **options: Any) -> Any:
        # the third argument of torch.nn.functional's is a stack level
        dtype = next((a for a in rest if isinstance(a, torch.dtype)), dtype)
        if not _fits(input, dim) or options.keys() - {"_stacklevel"}:
            return NotImplemented
        return map_rows(input, name, partial(function, dim=-1, dtype=dtype))

    return of


def _exp(input: Any, **options: Any) -> Any:
    return map_rows(input, "exp", torch.exp) if _fits(input) and not options else NotImplemented


def _product(input: Any, other: Any, **options: Any) -> Any:
    if options or not (_fits(input) and _fits(other)) or input.chain.source is not other.chain.source:
        return NotImplemented
    if input.shape != other.shape or input.dtype != other.dtype:
        return NotImplemented
    both = input.rows is not None and other.rows is not None
    if input.rows is not other.rows and not (both and torch.equal(input.rows, other.rows)):
        return NotImplemented
    return multiply_rows(input, other)


def _gather(input: Any, dim: int, index: Tensor, **options: Any) -> Any:
    if not _fits(input, dim) or any(options.values()) or type(index) is not Tensor or not index.numel():
        return NotImplemented
    known = index.dtype == torch.int64 and index.device == input.device
    if not known or index.dim() != input.dim() or index.shape[:-1] != input.shape[:-1]:
        return NotImplemented
    return reduce_rows(input, "gather", lambda x, index: x.gather(-1, index), index)


def _reduction(name: str, function: Callable[..., Tensor]) -> Callable[..., Any]:
    def of(input: Any, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
        if isinstance(dim, (tuple, list)) and len(dim) == 1:
            dim = dim[0]
        if not _fits(input, dim) or options.keys() - {"dtype"}:
            return NotImplemented
        y = reduce_rows(input, name, partial(function, dim=-1, **options))
        return y.unsqueeze(-1) if keepdim else y

    return of


@loss_over_classes
def _nll_loss(asked: LossArguments) -> Any:
    """`torch.nn.functional.nll_loss` of log-probabilities."""
    input, target, ignore_index = asked.input, asked.target, asked.ignore_index
    if not _fits(input) or type(target) is not Tensor:
        return NotImplemented
    counts = target != ignore_index
    if on_cpu(target):  # on a GPU the kernel itself raises the error for such an index
        _check_target(target[counts], input.size(-1))
    picked = _gather(input, -1, torch.where(counts, target, 0)[:, None])
    return reduced(-picked[:, 0], counts, None, asked.reduction)


def _check_target(target: Tensor, classes: int) -> None:
    outside = (target < 0) | (target >= classes)
    if outside.any():
        raise IndexError(f"Target {int(target[outside][0])} is out of bounds.")


@loss_over_classes
def _cross_entropy(asked: LossArguments) -> Any:
    """`torch.nn.functional.cross_entropy` of logits, as torch composes it."""
    input, target, ignore_index, reduction = asked.input, asked.target, asked.ignore_index, asked.reduction
    if not _fits(input) or type(target) is not Tensor:
        return NotImplemented
    # autocast may run a whole cross entropy in fp32 although it leaves a log_softmax alone
    dtype, loss_dtype = loss_dtypes(input.device, input.dtype)
    log_probabilities = torch.log_softmax(input, 1, dtype=dtype if loss_dtype != input.dtype else None)
    loss: Tensor = F.nll_loss(log_probabilities, target, ignore_index=ignore_index, reduction=reduction)
    if asked.label_smoothing == 0.0:
        return loss
    ignored = target == ignore_index
    smooth = -log_probabilities.sum(1).masked_fill(ignored, 0)
    if reduction == "mean":
        smooth = smooth.sum() / (target.numel() - ignored.sum())
    elif reduction == "sum":
        smooth = smooth.sum()
    return (1 - asked.label_smoothing) * loss + smooth * (asked.label_smoothing / input.size(-1))


def _detached(input: DeferredLogits) -> Tensor:
    """`detach`, whose result shares the memory of the values, as in stock. Autograd's own `detach` runs below this."""
    input.chain.source.lend()
    return plain(input).detach()


def _register_hook(input: Tensor, hook: Callable[[Tensor], Any]) -> Any:
    # a hook may keep the gradient for longer than it can be computed
    return _as_stock(Tensor.register_hook, input, lambda dy: hook(dense(dy)))


def _retain_grad(input: Tensor) -> Any:
    _as_stock(Tensor.register_hook, input, dense)
    return _as_stock(Tensor.retain_grad, input)


def _as_stock(function: Callable[..., Any], *args: Any) -> Any:
    with without_torch_function():
        return function(*args)


# one row for each of several functions
_same = dict.fromkeys
_TABLE: dict[Any, Callable[..., Any]] = {
    **_same(
        (F.log_softmax, torch.log_softmax, Tensor.log_softmax, torch.special.log_softmax),
        _softmax_like("log_softmax", torch.log_softmax),
    ),
    **_same((F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax), _softmax_like("softmax", torch.softmax)),
    **_same((torch.exp, Tensor.exp), _exp),
    **_same((torch.mul, Tensor.mul, torch.multiply, Tensor.multiply, Tensor.__mul__), _product),
    **_same((torch.gather, Tensor.gather), _gather),
    **_same((torch.logsumexp, Tensor.logsumexp, torch.special.logsumexp), _reduction("logsumexp", torch.logsumexp)),
    **_same((torch.sum, Tensor.sum), _reduction("sum", torch.sum)),
    **_same((torch.argmax, Tensor.argmax), _reduction("argmax", torch.argmax)),
    **_same((torch.mean, Tensor.mean), _reduction("mean", torch.mean)),
    F.nll_loss: _nll_loss,
    F.cross_entropy: _cross_entropy,
    Tensor.detach: _detached,
    Tensor.register_hook: _register_hook,
    Tensor.retain_grad: _retain_grad,
}


def row_function(func: Any) -> Callable[..., Any] | None:
    """What runs instead of a function of torch on logits that left their model; None: torch's own."""
    return _TABLE.get(func)


def held_row_function(func: Any) -> Callable[..., Any] | None:
    """The same for logits of a forward without gradients. Torch's own `detach` runs there, and they stay deferred.

    Whoever copies them wants the values of now.
    """
    if func in (torch.clone, Tensor.clone):
        return lambda input, **options: plain(input).clone(**options)
    return None if func is Tensor.detach else row_function(func)
