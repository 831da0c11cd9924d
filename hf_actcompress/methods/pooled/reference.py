"""Means of neighbouring tokens, or of squares of pixels of a feature map."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from ...reference.groups import work_dtype


def pooled_pack(x: Tensor, window: int) -> Tensor:
    """[..., ceil(T / p), C]: means of p = `window` neighbours in x [..., T, C]; the last group may be smaller."""
    whole = x.size(-2) // window * window
    parts = []
    if whole:
        parts.append(torch.unflatten(x[..., :whole, :], -2, (-1, window)).mean(-2))
    if whole < x.size(-2):
        parts.append(x[..., whole:, :].mean(-2, keepdim=True))
    return torch.cat(parts, dim=-2) if len(parts) != 1 else parts[0]


def pooled_real_pack(x: Tensor, real: Tensor, window: int) -> Tensor:
    """As `pooled_pack`, but only tokens that are `real` [..., T], bool, count. A group without such a token is zero."""
    real = real.unsqueeze(-1)
    # other tokens may have any value, NaN included
    sums = pooled_pack(torch.where(real, x, torch.zeros((), dtype=x.dtype, device=x.device)), window)
    share = pooled_pack(real.to(work_dtype(x.dtype)), window)
    return (sums / torch.where(share > 0, share, 1)).to(x.dtype)


def pooled_unpack(pooled: Tensor, tokens: int, window: int) -> Tensor:
    """[..., T, C]: every token is its group's mean."""
    return pooled.repeat_interleave(window, dim=-2)[..., :tokens, :].contiguous()


def pooled_grad_weight(dy: Tensor, pooled: Tensor, window: int) -> Tensor:
    """dW [O, C] from dy [..., T, O]: the product of dy's sums and x's means, with T / p rows instead of T."""
    tokens = dy.size(-2)
    whole = tokens // window * window
    sums = dy.new_empty(*dy.shape[:-2], pooled.size(-2), dy.size(-1))
    sums[..., : whole // window, :] = torch.unflatten(dy[..., :whole, :], -2, (-1, window)).sum(-2)
    if whole < tokens:
        sums[..., -1, :] = dy[..., whole:, :].sum(-2)
    return sums.flatten(0, -2).t().mm(pooled.flatten(0, -2))


def pooled_image_pack(x: Tensor, window: int) -> Tensor:
    """[..., ceil(H / p), ceil(W / p)]: means of p x p squares of x [..., H, W]; squares at the edges may be smaller."""
    maps = x.reshape(-1, 1, *x.shape[-2:])
    # with ceil_mode the padding does not count: a sum is divided by the number of pixels inside
    means = avg_pool2d(maps.to(work_dtype(x.dtype)), window, ceil_mode=True, count_include_pad=False)
    return means.to(x.dtype).view(*x.shape[:-2], *means.shape[-2:])


def pooled_image_unpack(pooled: Tensor, height: int, width: int, window: int) -> Tensor:
    """[..., H, W]: every pixel is its square's mean."""
    rows = pooled.repeat_interleave(window, dim=-2)[..., :height, :]
    return rows.repeat_interleave(window, dim=-1)[..., :width].contiguous()
