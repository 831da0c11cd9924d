"""Hidden states, a head and targets, for the tests of the loss head's op and of deferred logits."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def problem(n=37, d=16, v=301, dtype=torch.float32, ignored=0.3):
    """h [n, d], weight [v, d], bias [v], target [n]. In half of the rows the target has the largest logit."""
    h, weight, bias = torch.randn(n, d), torch.randn(v, d) * 0.5, torch.randn(v)
    target = torch.randint(0, v, (n,))
    target[::2] = F.linear(h, weight, bias)[::2].argmax(1)
    target[torch.rand(n) < ignored] = -100
    leaves = [x.to(dtype).requires_grad_() for x in (h, weight, bias)]
    return (*leaves, target)


def wide(tensors):
    return [None if x is None else x.detach().double().requires_grad_(x.requires_grad) for x in tensors]
