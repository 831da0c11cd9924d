"""Gradient checkpointing and hooks on saved tensors: gradients and random numbers are those of stock with the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from hf_actcompress import patch_model
from hf_actcompress.records import live_entries
from tests.families import BODY, BY_NAME, FAMILIES, Family, build, differing, mode_of, step

THREE = [BY_NAME[name] for name in ("bert", "gpt2-gelu-tanh", "llama")]
three = pytest.mark.parametrize("family", THREE, ids=lambda f: f.name)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def _enable(model: Any, api: str, **options: Any) -> Any:
    if not hasattr(model, f"{api}_checkpointing_enable"):
        pytest.skip("this transformers knows gradient_checkpointing_enable alone")
    getattr(model, f"{api}_checkpointing_enable")(**options)
    return model


def _assert_like_stock(ours: Any, stock: Any, family: Family, mode: str = "bf16") -> None:
    """Compare the loss, the gradients, and the state of the generator afterwards."""
    batch = family.make_batch(family.paddings[-1])
    expected_loss, expected = step(stock, batch, mode)
    expected_state = torch.get_rng_state()
    loss, grads = step(ours, batch, mode)
    assert torch.equal(loss, expected_loss)
    assert torch.equal(torch.get_rng_state(), expected_state)
    assert grads.keys() == expected.keys()
    if mode in family.bit_equal:
        assert not differing(grads, expected)
    assert live_entries() == 0


@pytest.mark.daily(3)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_with_dropout(family: Family, reentrant: bool) -> None:
    options = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    ours, stock = (_enable(family.build(torch.bfloat16, dropout=0.1), "gradient", **options) for _ in range(2))
    _assert_like_stock(patch_model(ours, BODY), stock, family)


@three
@pytest.mark.parametrize("mode", ["fp32", "autocast"])
def test_checkpointing_in_other_modes(family: Family, mode: str) -> None:
    ours, stock = (_enable(build(family, mode, dropout=0.1), "gradient") for _ in range(2))
    _assert_like_stock(patch_model(ours, BODY), stock, family, mode)


@three
@pytest.mark.parametrize("api", ["gradient", "activation"])
@pytest.mark.parametrize("first", ["patch", "checkpointing"])
def test_either_name_in_either_order(family: Family, api: str, first: str) -> None:
    stock = _enable(family.build(torch.bfloat16, dropout=0.1), api)
    ours = family.build(torch.bfloat16, dropout=0.1)
    ours = _enable(patch_model(ours, BODY), api) if first == "patch" else patch_model(_enable(ours, api), BODY)
    _assert_like_stock(ours, stock, family)
    for model in (ours, stock):
        getattr(model, f"{api}_checkpointing_disable")()
    _assert_like_stock(ours, stock, family)


@three
def test_every_n_layers(family: Family) -> None:
    names = inspect.signature(getattr(family.build(), "activation_checkpointing_enable", lambda: None)).parameters
    if "every_n_layers" not in names:
        pytest.skip("this transformers has no every_n_layers")
    ours, stock = (_enable(family.build(torch.bfloat16, dropout=0.1), "activation", every_n_layers=2) for _ in range(2))
    _assert_like_stock(patch_model(ours, BODY), stock, family)


@three
def test_the_layers_are_recomputed(family: Family) -> None:
    """Checkpointing really is on: each layer's norm runs twice."""
    model = patch_model(_enable(family.build(), "gradient"), BODY)
    calls = []
    norm = next(m for n, m in model.named_modules() if "0" in n.split(".") and "norm" in type(m).__name__.lower())
    norm.register_forward_hook(lambda *_: calls.append(1))
    step(model, family.make_batch())
    assert len(calls) == 2


class _Offload(saved_tensors_hooks):
    """Hooks like TRL's OffloadActivations: large tensors are copied, parameters and small tensors are not."""

    def __init__(self) -> None:
        self.packed = 0

        def pack(x: Tensor) -> tuple[bool, Tensor]:
            large = x.numel() >= 256 and not isinstance(x, torch.nn.Parameter)
            self.packed += large
            return large, x.detach().clone() if large else x

        def unpack(entry: tuple[bool, Tensor]) -> Tensor:
            return entry[1].clone() if entry[0] else entry[1]

        super().__init__(pack, unpack)


_HOOKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {"save_on_cpu": save_on_cpu, "offload": _Offload}


@three
@pytest.mark.parametrize("hooks", _HOOKS)
@pytest.mark.parametrize("mode", ["bf16", "autocast"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_hooks_around_training(family: Family, hooks: str, mode: str, checkpointing: bool) -> None:
    models = []
    for _ in range(2):
        model = build(family, mode, dropout=0.1)
        models.append(_enable(model, "gradient") if checkpointing else model)
    ours, stock = patch_model(models[0], BODY), models[1]
    with _HOOKS[hooks]() as active:
        _assert_like_stock(ours, stock, family, mode)
        assert not isinstance(active, _Offload) or active.packed > 0


@three
def test_hooks_around_the_forward_alone(family: Family) -> None:
    ours, stock = (family.build(torch.bfloat16, dropout=0.1) for _ in range(2))
    patch_model(ours, BODY)
    results = []
    for model in (ours, stock):
        torch.manual_seed(3)
        with save_on_cpu(), mode_of("bf16"):
            loss = model(**family.make_batch("left")).loss
        loss.backward()
        results.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert not differing(*results)
