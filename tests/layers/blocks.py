"""Blocks as people write them outside of transformers, and models of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS = 32, 4


class Block(nn.Module):
    """As written by hand in many repositories."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(y))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Modulated(nn.Module):
    """As in diffusion transformers: the norm has no weights, and a condition scales, shifts and gates."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.condition = nn.LayerNorm(WIDTH, elementwise_affine=False), nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scale, shift, gate = self.condition(F.silu(x.mean(1, keepdim=True))).chunk(3, dim=-1)
        return x + gate * self.mlp(self.norm(x) * (1 + scale) + shift)


class PlainList(nn.Module):
    """Reads its modules from a list that torch does not know, as MaskFormer does."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(inplace=True)]
        for i, step in enumerate(self.steps):
            self.add_module(str(i), step)

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


class Quantised(nn.Module):
    """Returns losses, too, as the quantisers of sound codecs do."""

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.into = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.into(x)
        nearest = self.codes(torch.cdist(y, self.codes.weight[None]).argmin(-1))
        return y + (nearest - y).detach(), F.mse_loss(y, nearest.detach()), F.mse_loss(nearest, y.detach())


class Rotating(nn.Module):
    """Writes the even and the odd features of a new tensor, as the video transformers of diffusers do."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        even, odd = self.into(x).unflatten(-1, (-1, 2)).unbind(-1)
        y = torch.empty_like(x)
        y[..., 0::2], y[..., 1::2] = even * 0.6 - odd * 0.8, even * 0.8 + odd * 0.6
        return x + self.out(y)


class Stack(nn.Module):
    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.blocks, (nn.Sequential, nn.TransformerEncoder)):
            return self.blocks(x).square().mean()  # type: ignore[no-any-return]
        total = x.new_zeros(())
        for block in self.blocks:
            y = block(x)
            x, losses = (y, ()) if isinstance(y, Tensor) else (y[0], y[1:])
            total = total + sum(losses)
        return total + x.square().mean()


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2)


STACKS: dict[str, Callable[[], nn.Module]] = {
    "list": lambda: nn.ModuleList(Block() for _ in range(3)),
    "sequential": lambda: nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH)),
    "torch's encoder": encoder,
    "modulated": lambda: nn.ModuleList(Modulated() for _ in range(2)),
    "rotating": lambda: nn.ModuleList(Rotating() for _ in range(2)),
    "plain list": lambda: nn.Sequential(PlainList(), PlainList()),
    "losses": lambda: nn.ModuleList([Quantised()]),
}
