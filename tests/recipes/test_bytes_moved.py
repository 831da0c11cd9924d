"""The count of moved bytes is right for known ops and kernels. For models it is not larger than the committed one."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_actcompress import reference

RECIPES = Path(__file__).parents[2] / "recipes"
COMMITTED = RECIPES / "results" / "bytes" / "bytes_moved.json"
WITH_ADAPTERS = RECIPES / "results" / "bytes" / "lora" / "bytes_moved.json"
# tokens, width
N, D = 64, 256
X = 2 * N * D


@pytest.fixture(autouse=True)
def _recipes_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))


def tensor(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes or (N, D)).to(torch.bfloat16)


def counted(run: Callable[[], Any]) -> Any:
    traffic = importlib.import_module("common.traffic")
    counter = traffic.Traffic()
    with traffic.interpreted_launches(counter), counter:
        run()
    return counter


OPS: dict[str, tuple[Callable[..., Any], float]] = {
    "a sum": (lambda x: x + x.clone(), 2 + 3),
    "one tensor twice": (lambda x: x * x, 2),
    "in place": (lambda x: x.clone().add_(x), 2 + 3),
    "a copy into memory": (lambda x: torch.empty_like(x).copy_(x), 2),
    "a cast": (lambda x: x.float(), 3),
    "a view": (lambda x: x.t().view(D, N).unsqueeze(0)[:, 1:], 0),
    "a row that is repeated": (lambda x: x * x[:1].clone().expand(N, D), 2 + 3 / N),
    "a part": (lambda x: x[: N // 2].neg(), 1),
    "SwiGLU": (lambda x: torch.nn.functional.silu(x) * x.t().contiguous().view(N, D), 2 + 2 + 3),
    "a product": (lambda x: x @ x.t(), 0),
}


@pytest.mark.parametrize("name", OPS)
def test_ops_of_torch(name: str) -> None:
    op, tensors = OPS[name]
    x = tensor()
    assert counted(lambda: op(x)).bytes == tensors * X


def _norm(rms: bool, residual: bool = False) -> Callable[[], Any]:
    from hf_actcompress.kernels.layer_norm import layer_norm_bwd
    from hf_actcompress.kernels.rms_norm import rms_norm_bwd

    dy, x, weight = tensor(), tensor(), tensor(D)
    dresidual = tensor() if residual else None
    if rms:
        _, rstd = reference.rms_norm_fwd(x, weight, 1e-6, "weight_after_cast")
        return lambda: rms_norm_bwd(dy, x, weight, rstd, "weight_after_cast", (True, False), dresidual)
    _, mean, rstd = reference.layer_norm_fwd(x, (D,), weight, None, 1e-6)
    return lambda: layer_norm_bwd(dy, x, (D,), mean, rstd, weight, None, (True, False, False), dresidual)


def _rope() -> Callable[[], Any]:
    from hf_actcompress.kernels.rope import rope_fwd

    x, cos, sin = tensor(1, 4, N, D // 4), tensor(1, 1, N, D // 4), tensor(1, 1, N, D // 4)
    return lambda: rope_fwd(x, cos, sin)


def _activation() -> Callable[[], Any]:
    from hf_actcompress.kernels.activation import activation_bwd

    dy, x = tensor(), tensor()
    return lambda: activation_bwd(dy, x, "silu")


# the [N, D] tensors that each kernel moves, and the bytes of smaller tensors
KERNELS: dict[str, tuple[Callable[[], Callable[[], Any]], int, int]] = {
    "RMSNorm, backward": (lambda: _norm(True), 3, 4 * N + 2 * D),
    "LayerNorm, backward": (lambda: _norm(False), 3, 8 * N + 2 * D),
    "RMSNorm, backward, and a sum": (lambda: _norm(True, True), 4, 4 * N + 2 * D),
    "LayerNorm, backward, and a sum": (lambda: _norm(False, True), 4, 8 * N + 2 * D),
    "rope, with angles of a quarter of the width": (_rope, 2, 2 * X // 4 + X // 4),
    "SiLU, backward": (_activation, 3, 0),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="seen in the interpreter")
@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name: str) -> None:
    pytest.importorskip("triton")
    make, tensors, rest = KERNELS[name]
    run = make()
    found = counted(run)
    assert all(kernel.endswith("_kernel") for kernel in found.moved) and found.launches == 1
    assert tensors * X <= found.bytes <= tensors * X + rest


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="seen in the interpreter")
@pytest.mark.daily(3)
@pytest.mark.parametrize(
    ("model", "committed_in"),
    [("llama", COMMITTED), ("gpt2", COMMITTED), ("bert", COMMITTED), ("llama", WITH_ADAPTERS)],
    ids=["llama", "gpt2", "bert", "llama with adapters"],
)
def test_models_move_no_more_than_is_committed(model: str, committed_in: Path) -> None:
    pytest.importorskip("triton")
    record, recipe = json.loads(committed_in.read_text()), importlib.import_module("bytes_moved")
    mode = "exact, kernels"
    (committed,) = (row["total"] for row in record["rows"] if (row["model"], row["mode"]) == (model, mode))
    found = recipe.measure(model, mode, record["options"]["hidden"], committed_in is WITH_ADAPTERS)
    assert found.total < committed + 0.5, (found.forward, found.backward)


def test_what_is_committed_is_within_the_limits() -> None:
    """Limits are shares of stock's bytes. Patched models move more where they rebuild what is one kernel in torch.

    LayerNorm's backward is torch's, which adds no residual: GPT-2 moves 8 h more than with our kernel for it.
    """
    rows = json.loads(COMMITTED.read_text())["rows"]
    total = {(row["model"], row["mode"]): row["total"] for row in rows}
    share = {model: total[model, "exact, kernels"] / total[model, "stock"] for model in ("llama", "gpt2", "bert")}
    assert share["llama"] < 0.35 and share["gpt2"] < 0.32 and share["bert"] < 1.25
    assert total["llama", "exact, kernels"] <= 160
    adapted = {row["mode"]: row["total"] for row in json.loads(WITH_ADAPTERS.read_text())["rows"]}
    assert adapted["exact, kernels"] < 0.57 * adapted["stock"]
