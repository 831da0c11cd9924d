"""Make the tables of the few-bit backward passes: hf_actcompress/methods/fewbit/tables.py.

STEPS   the step function of 2**k levels that is nearest to f' in the integral of the squared difference over
        [-100, 100] (few-bit backward, arXiv 2202.00441): dynamic programming over a grid, then over finer grids around
        the borders found. The level of a cell [a, b] is (f(b) - f(a)) / (b - a). Where f' is even about a centre the
        step function is one of |x - centre|, which saves a bit.
CENTRES those centres.
LEVELS  2**k levels for the *value* of f', with the smallest integral of the squared difference when each f' goes to the
        nearest level. These codes need not be intervals of x: both sides of a bump share their levels. The weight is
        that of x ~ N(0, 1) plus a tenth everywhere; a level next to 0 or 1 is moved onto it, so that dead units leak
        nothing. (SELU's active units have another slope than 1, which is a level in its place.)
GRIDS   a uniform grid for the value of f' at 8 bits: levels (j - zero) * step, j = 0 .. 255, 0 and 1 among them.
PRIMITIVE_STEPS   the derivative of the sum of three ReLUs nearest to f itself (ReGELU2, ReSiLU2, arXiv 2406.16282).

    python recipes/fit_fewbit.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
import typer
from torch import Tensor
from torch.nn import functional

Function = Callable[[Tensor], Tensor]

# a range so wide that f' is constant beyond it, so the outer levels are these constants; less for f' ~ 1 / sqrt(x)
REACH = 100.0
REACHES = {"sqrt_softplus": 10.0}
CENTRES = {"sigmoid": 0.0, "tanh": 0.0, "laplace": 0.707107, "softsign": 0.0}
# slope of active units, if it is not 1
SLOPES = {"selu": 1.0507009873554804934193349852946}
TABLE = Path(__file__).resolve().parents[1] / "hf_actcompress" / "methods" / "fewbit" / "tables.py"
# 5-point Gauss-Legendre on [-1, 1]
NODES = torch.tensor([-0.906179845938664, -0.5384693101056831, 0.0, 0.5384693101056831, 0.906179845938664]).double()
WEIGHTS = torch.tensor([0.2369268850561891, 0.4786286704993665, 0.5688888888888889, 0.4786286704993665]).double()
WEIGHTS = torch.cat([WEIGHTS, WEIGHTS[:1]])


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _laplace(x: Tensor) -> Tensor:
    return 0.5 * (1.0 + torch.erf((x - 0.707107) / (0.282095 * math.sqrt(2.0))))


def _sqrt_softplus(x: Tensor) -> Tensor:
    # far to the left softplus(x) is exp(x), while torch's rounds to 0
    return torch.where(x < -30, torch.exp(x / 2), functional.softplus(x.clamp(min=-30), threshold=200).sqrt())


ACTIVATIONS: dict[str, Function] = {
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": functional.silu,
    "mish": functional.mish,
    "hardswish": functional.hardswish,
    "elu": functional.elu,
    "selu": functional.selu,
    "softplus": functional.softplus,
    "softsign": functional.softsign,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "quick_gelu": _quick_gelu,
    "laplace": _laplace,
    "sqrt_softplus": _sqrt_softplus,
}
PRIMITIVES = ("gelu", "silu")
STEP_BITS = (1, 2, 3, 4)
LEVEL_BITS = (2, 3, 4)


def derivative(function: Function, x: Tensor) -> Tensor:
    """f'(x) in x's dtype."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(function(x).sum(), x)[0]


def base_grid(low: float = -REACH, high: float = REACH) -> Tensor:
    """Points from low to high, dense where activations bend; 0 and the kinks of hardswish are among them."""
    tail = 12.0 * (REACH / 12.0) ** (torch.arange(1, 61, dtype=torch.float64) / 60)
    core = torch.arange(-600, 601, dtype=torch.float64) / 50
    points = torch.cat([-tail.flip(0), core, tail])
    return points[(points >= low) & (points <= high)]


def squared_integral(function: Function, points: Tensor) -> Tensor:
    """The integral of f'^2 from the first point to each."""
    low, high = points[:-1], points[1:]
    nodes = (low + high)[:, None] / 2 + (high - low)[:, None] / 2 * NODES
    cells = (derivative(function, nodes).square() @ WEIGHTS) * (high - low) / 2
    return torch.cat([cells.new_zeros(1), cells.cumsum(0)])


def best_partition(error: Tensor, cells: int) -> list[int]:
    """Edges, with both ends, of the cheapest chain of `cells` cells. error [i, j]: the error of a cell from i to j."""
    best, came_from = error[0], []
    for _ in range(cells - 1):
        best, origin = (best[:, None] + error).min(dim=0)
        came_from.append(origin)
    edges = [error.size(1) - 1]
    for origin in reversed(came_from):
        edges.append(int(origin[edges[-1]]))
    return [0, *reversed(edges)]


def best_cells(function: Function, points: Tensor, candidates: Tensor, levels: int) -> Tensor:
    """Borders among `points[candidates]` of the best step function with that many levels: levels - 1 of them."""
    at = points[candidates]
    f, f2 = function(at), squared_integral(function, points)[candidates]
    width = at[None, :] - at[:, None]
    # [i, j]: the error of one cell from i to j, infinite unless i < j
    error = f2[None, :] - f2[:, None] - (f[None, :] - f[:, None]).square() / width
    error = torch.where(width > 0, error, math.inf)
    return at[best_partition(error, levels)[1:-1]]


def optimal_steps(function: Function, bits: int, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Borders [2**bits - 1] and levels [2**bits] of the step function nearest to f' on [low, high]."""
    points = base_grid(low, high)
    ends = points[[0, -1]]
    borders = best_cells(function, points, torch.arange(len(points)), 2**bits)
    spacing = 0.02
    for _ in range(4):
        offsets = torch.linspace(-spacing, spacing, 21, dtype=torch.float64)
        # wider intervals in the tails, where the first grid was coarser
        scale = torch.where(borders.abs() > 12, borders.abs() / 6, 1.0)
        near = (borders[:, None] + offsets * scale[:, None]).flatten()
        # the borders found so far are among the candidates, bit by bit
        fine = torch.cat([near[(near > ends[0]) & (near < ends[1])], ends, borders]).unique()
        merged = torch.cat([points, fine]).unique()
        borders = best_cells(function, merged, torch.searchsorted(merged, fine), 2**bits)
        spacing /= 8
    edges = torch.cat([ends[:1], borders, ends[1:]])
    return borders, function(edges).diff() / edges.diff()


def steps_of(name: str, bits: int) -> tuple[Tensor, Tensor]:
    """`optimal_steps` of a row of the table, in |x - centre| where it has one."""
    function, reach = ACTIVATIONS[name], REACHES.get(name, REACH)
    if name in CENTRES:
        return optimal_steps(lambda x: function(x + CENTRES[name]), bits, 0.0, reach)
    return optimal_steps(function, bits, -reach, reach)


def sampled_slopes(name: str) -> tuple[Tensor, Tensor]:
    """f' at the middle of each cell of the grid, in ascending order, and the weight of the cell."""
    reach = REACHES.get(name, REACH)
    points = base_grid(-reach, reach)
    x = (points[:-1] + points[1:]) / 2
    weight = (torch.exp(-x * x / 2) / math.sqrt(2 * math.pi) + 0.1) * points.diff()
    slope, order = derivative(ACTIVATIONS[name], x).sort()
    return slope, weight[order]


def value_levels(name: str, bits: int) -> list[float]:
    """Levels [2**bits] for the value of f', ascending."""
    slope, weight = sampled_slopes(name)
    moments = [torch.cat([slope.new_zeros(1), (weight * slope**k).cumsum(0)]) for k in range(3)]
    w, s, q = (m[None, :] - m[:, None] for m in moments)
    edges = best_partition(torch.where(w > 0, q - s.square() / w, math.inf), 2**bits)
    levels = [(s[a, b] / w[a, b]).item() for a, b in pairwise(edges)]
    unit = SLOPES.get(name, 1.0)
    whole = [unit * round(level / unit) for level in levels]
    return [near if abs(level - near) < 0.005 else level for level, near in zip(levels, whole, strict=True)]


def value_grid(name: str) -> tuple[int, float]:
    """The code of zero and the step of a uniform grid of 256 levels from f's least to its greatest slope."""
    slope = derivative(ACTIVATIONS[name], base_grid())
    low, high = slope.min().item(), slope.max().item()
    # as many steps between 0 and 1 (or the greatest slope, where that is less) as leave room below and above
    unit = min(SLOPES.get(name, 1.0), high)
    steps = 255
    while math.ceil(-low / unit * steps - 1e-9) + math.ceil(high / unit * steps - 1e-9) > 255:
        steps -= 1
    return math.ceil(-low / unit * steps - 1e-9), unit / steps


def relu_sum(function: Function) -> tuple[list[float], list[float]]:
    """Breakpoints (-c, 0, c) and the four slopes of the nearest a ReLU(x + c) + (1 - 2a) ReLU(x) + a ReLU(x - c)."""
    points = base_grid()
    x, weight = (points[:-1] + points[1:]) / 2, points.diff()
    best = (math.inf, 0.0, 0.0)
    low, high = 0.5, 12.0
    for _ in range(6):
        candidates = torch.linspace(low, high, 41, dtype=torch.float64).tolist()
        for c in candidates:
            bump = (x + c).relu() + (x - c).relu() - 2 * x.relu()
            rest = function(x) - x.relu()
            a = ((rest * bump * weight).sum() / (bump * bump * weight).sum()).item()
            best = min(best, (((rest - a * bump).square() * weight).sum().item(), c, a))
        margin = (high - low) / 20
        low, high = best[1] - margin, best[1] + margin
    _, c, a = best
    return [-c, 0.0, c], [0.0, a, 1.0 - a, 1.0]


def _numbers(values: list[float]) -> str:
    rounded = [float(f"{v:.7g}") if abs(v) > 1e-9 else 0.0 for v in values]
    return "(" + ", ".join(map(repr, rounded)) + ("," if len(rounded) == 1 else "") + ")"


def _pair(indent: str, key: str, borders: list[float], levels: list[float]) -> list[str]:
    return [f"{indent}{key}: ({_numbers(borders)},", f"{indent}    {_numbers(levels)}),"]


def _source() -> str:
    pair = "tuple[tuple[float, ...], tuple[float, ...]]"
    lines = [
        '"""Written by recipes/fit_fewbit.py, which says what it is. Not edited by hand."""',
        "",
        "# fmt: off",
        "# ruff: noqa: E501",
        "from __future__ import annotations",
        "",
        "# kind -> the centre about which f' is even",
        f"CENTRES: dict[str, float] = {CENTRES!r}".replace("'", '"'),
        "",
        "# kind -> bits -> (borders, levels)",
        f"STEPS: dict[str, dict[int, {pair}]] = {{",
    ]
    for name in ACTIVATIONS:
        lines.append(f'    "{name}": {{')
        for bits in STEP_BITS:
            borders, levels = steps_of(name, bits)
            lines += _pair("        ", str(bits), borders.tolist(), levels.tolist())
        lines.append("    },")
    lines += ["}", "", "# kind -> bits -> levels", "LEVELS: dict[str, dict[int, tuple[float, ...]]] = {"]
    for name in ACTIVATIONS:
        rows = [f"{bits}: {_numbers(value_levels(name, bits))}" for bits in LEVEL_BITS]
        lines += [f'    "{name}": {{', *(f"        {row}," for row in rows), "    },"]
    lines += ["}", "", "# kind -> (code of zero, step) at 8 bits", "GRIDS: dict[str, tuple[int, float]] = {"]
    lines += [f'    "{name}": {value_grid(name)!r},' for name in ACTIVATIONS]
    lines += ["}", "", "# kind -> (borders, levels)", f"PRIMITIVE_STEPS: dict[str, {pair}] = {{"]
    for name in PRIMITIVES:
        lines += _pair("    ", f'"{name}"', *relu_sum(ACTIVATIONS[name]))
    return "\n".join([*lines, "}", ""])


def main(output: Path = TABLE) -> None:
    """Compute every table and write the file."""
    output.write_text(_source())
    typer.echo(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
