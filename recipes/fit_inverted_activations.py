"""Fit a GELU-like activation's derivative as a function of its output: methods/inverted/tables.py.

f has one minimum, y* = f(x*). On either side of it f'(x) is a smooth function of a coordinate that y gives:

  right of it   s = sqrt(y - y*)          f' = s P(s), on two pieces; 1 beyond the last
  left of it    w = sqrt(-log(y / y*))    f' = y w Q(w), which is s / sqrt(|y*|) near the minimum and ~ |x| in the tail

P and Q are polynomials of degree 8 in the coordinate mapped to [-1, 1], minimax by Lawson's reweighted least squares.

    python recipes/fit_inverted_activations.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import typer
from torch import Tensor
from torch.nn import functional

Function = Callable[[Tensor], Tensor]

DEGREE = 8
POINTS = 3000
ROUNDS = 120
TABLE = Path(__file__).resolve().parents[1] / "hf_actcompress" / "methods" / "inverted" / "tables.py"


class Branches(NamedTuple):
    """An activation, where its branches end (f and f' - 1 are about 1e-6 or less) and where the right one is split."""

    function: Function
    low: float
    high: float
    # as a fraction of the right branch's range of s
    split: float = 0.6


def _sigmoid_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Branches] = {
    "gelu": Branches(functional.gelu, -6.5, 5.5),
    "gelu_tanh": Branches(_gelu_tanh, -5.5, 5.0),
    "quick_gelu": Branches(_sigmoid_gelu, -14.0, 9.5, split=0.53),
    "silu": Branches(functional.silu, -24.0, 16.0, split=0.53),
    "mish": Branches(functional.mish, -24.0, 9.0, split=0.53),
}


def derivative(function: Function, x: Tensor) -> Tensor:
    """f'(x) in x's dtype."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(function(x).sum(), x)[0]


def minimum(row: Branches) -> tuple[float, float]:
    """x* and y*, by bisection of f'."""
    low, high = -2.0, 0.0
    while high - low > 4e-16:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if derivative(row.function, torch.tensor(middle, dtype=torch.float64)) < 0:
            low = middle
        else:
            high = middle
    return middle, row.function(torch.tensor(middle, dtype=torch.float64)).item()


def minimax(basis: Tensor, target: Tensor) -> Tensor:
    """Coefficients that about minimise max |basis @ c - target|. basis [P, K], target [P]."""
    weights = torch.full_like(target, 1 / len(target))
    best, smallest = torch.zeros(basis.size(1), dtype=basis.dtype), math.inf
    for _ in range(ROUNDS):
        root = weights.sqrt()[:, None]
        c = torch.linalg.lstsq(basis * root, target[:, None] * root, driver="gelsd").solution[:, 0]
        error = (basis @ c - target).abs()
        if error.max() < smallest:
            best, smallest = c, error.max().item()
        weights = weights * (error + 1e-15)
        weights = weights / weights.sum()
    return best


def piece(coordinate: Tensor, factor: Tensor, target: Tensor) -> tuple[float, float, list[float]]:
    """Centre and half width of the coordinate's range, and the polynomial that times `factor` approximates `target`."""
    low, high = coordinate.min().item(), coordinate.max().item()
    centre, half = (low + high) / 2, (high - low) / 2
    z = (coordinate - centre) / half
    basis = torch.stack([factor * z**k for k in range(DEGREE + 1)], dim=1)
    return centre, half, minimax(basis, target).tolist()


def fit(row: Branches) -> dict[str, object]:
    """The fields of one row of the table."""
    x_min, y_min = minimum(row)
    # denser near the minimum, but not at it, because there both sides of the equation are zero
    t = torch.linspace(0, 1, POINTS + 1, dtype=torch.float64)[1:] ** 1.5

    x = x_min + (row.low - x_min) * t
    y = row.function(x)
    w = torch.sqrt(-torch.log(y / y_min))
    pieces = [piece(w, y * w, derivative(row.function, x))]

    x = x_min + (row.high - x_min) * t
    s = torch.sqrt(row.function(x) - y_min)
    target, split = derivative(row.function, x), row.split * s.max().item()
    for inside in (s <= split, s >= split):
        pieces.append(piece(s[inside], s[inside], target[inside]))
    return {
        "x_min": x_min,
        "y_min": y_min,
        "split": split,
        "end": s.max().item(),
        "centres": tuple(p[0] for p in pieces),
        "halves": tuple(p[1] for p in pieces),
        "coefficients": tuple(tuple(p[2]) for p in pieces),
    }


def _source(fits: dict[str, dict[str, object]]) -> str:
    lines = [
        '"""Written by recipes/fit_inverted_activations.py, which says what it is. Not edited by hand."""',
        "",
        "# fmt: off",
        "# ruff: noqa: E501",
        "from __future__ import annotations",
        "",
        "from .tables_fit import InvertedFit",
        "",
        "INVERTED: dict[str, InvertedFit] = {",
    ]
    for name, fields in fits.items():
        lines.append(f'    "{name}": InvertedFit(')
        for key, value in fields.items():
            if key == "coefficients":
                lines += ["        coefficients=(", *(f"            {_numbers(row)}," for row in value), "        ),"]  # type: ignore[attr-defined]
            else:
                lines.append(f"        {key}={_numbers(value) if isinstance(value, tuple) else repr(value)},")
        lines.append("    ),")
    return "\n".join([*lines, "}", ""])


def _numbers(values: Iterable[float]) -> str:
    return "(" + ", ".join(repr(float(f"{value:.10g}")) for value in values) + ")"


def main(output: Path = TABLE) -> None:
    """Fit every activation and write the table."""
    output.write_text(_source({name: fit(row) for name, row in ACTIVATIONS.items()}))
    typer.echo(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
