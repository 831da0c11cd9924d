"""Selects, from hundreds of moments, the few that are ever the highest, and from each polynomial the large terms."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...quick.formula import with_chunks
from .symbols import SYMBOLS, Polynomial, Term

# a moment or a term is left out if it is below this share of the sum at every point
_MOMENT, _TERM = 4e-3, 2e-4
_POINTS = 600


def points(grouped: bool, joined: bool) -> list[Mapping[str, float]]:
    """Sizes as models have them; they are random, but always the same."""
    draw = random.Random(0)
    found: list[Mapping[str, float]] = []
    for _ in range(_POINTS):
        head = 64 if joined else draw.choice((64, 80, 96, 128))
        kv_heads = draw.choice((1, 2, 4, 8, 12, 16, 32))
        groups = draw.choice((2, 3, 4, 5, 7, 8)) if grouped else 1
        heads = kv_heads * groups
        hidden = heads * head if joined or draw.random() < 0.7 else 64 * draw.randint(4, 128)
        sizes = {
            "batch": draw.choice((1, 1, 2, 4, 8, 16, 32, 64)), "seq": 2 ** draw.randint(6, 15), "hidden": hidden,
            "ffn": 64 * max(1, round(hidden * draw.choice((1.5, 2.7, 3.5, 4, 6)) / 64)), "head": head,
            "vocab": draw.choice((2_000, 30_522, 32_000, 50_257, 128_256, 151_936, 262_144)), "kv_heads": kv_heads,
            "groups": groups, "rank": draw.choice((4, 8, 16, 64)), "positions": 2 ** draw.randint(9, 13),
            "layers": draw.choice((3, 6, 12, 16, 24, 32, 48, 80)), "tile": max(256, hidden // 2),
            "experts": draw.choice((4, 8, 16, 64, 128)), "active": draw.choice((1, 2, 4)),
        }  # fmt: skip
        found.append(with_chunks(sizes))
    return found


def pruned(polynomials: Sequence[Polynomial], at: Sequence[Mapping[str, float]]) -> list[Polynomial]:
    """A few polynomials whose highest value at each point is that of all polynomials, up to some thousandths."""
    terms = sorted({term for polynomial in polynomials for term in polynomial})
    values = _matrix(polynomials, terms) @ _products(terms, at)
    highest = values.amax(0)
    left = torch.zeros_like(highest)
    chosen: list[int] = []
    # repeatedly take the polynomial that is the highest at most of the remaining points
    while (open_points := left < highest * (1 - _MOMENT)).any():
        serves = (values >= highest * (1 - _MOMENT))[:, open_points].sum(1)
        best = int(serves.argmax())
        chosen.append(best)
        left = torch.maximum(left, values[best])
    return [shortened(polynomials[index], at) for index in chosen]


def shortened(polynomial: Polynomial, at: Sequence[Mapping[str, float]]) -> Polynomial:
    """The polynomial without the terms that are a tiny part of it at every point."""
    terms = sorted(polynomial)
    if not terms:
        return polynomial
    parts = _matrix([polynomial], terms)[0][:, None] * _products(terms, at)
    share = (parts / parts.sum(0).abs().clamp_min(1)).abs().amax(1)
    return Polynomial(
        {term: polynomial[term] for term, part in zip(terms, share.tolist(), strict=True) if part > _TERM}
    )


def _matrix(polynomials: Sequence[Polynomial], terms: Sequence[Term]) -> Tensor:
    rows = [[float(polynomial.get(term, 0)) for term in terms] for polynomial in polynomials]
    return torch.tensor(rows, dtype=torch.float64)


def _products(terms: Sequence[Term], at: Sequence[Mapping[str, float]]) -> Tensor:
    """The value of each term at each point: [terms, points]."""
    sizes = torch.tensor([[point[name] for name in SYMBOLS] for point in at], dtype=torch.float64)
    exponents = torch.tensor(terms, dtype=torch.float64)
    return (exponents @ sizes.log().T).exp()
