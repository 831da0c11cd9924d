"""Models of diffusers keep less, with stock's gradients: `patch_model` is told nothing of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_actcompress import kept_bytes, patch_model, unpatch_model

pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")

from tests.integration.diffusers_models import MODELS, build  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
logging.getLogger("diffusers").setLevel(logging.ERROR)
# the shares of stock's bytes that are kept at most, in fp32 with all weights trained: under exact and under int8
SHARES = {"flux": (0.50, 0.20), "sd3": (0.55, 0.18), "unet": (0.55, 0.20), "wan": (0.50, 0.26), "ltx": (0.50, 0.21)}
# several blocks read an output of its way down, and their gradients are added up in another order
NOT_BIT_EQUAL = "unet"
Setup = Callable[[Any], Any]


def adapted(model: Any) -> None:
    model.requires_grad_(False)
    torch.manual_seed(1)
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    model.add_adapter(peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))


def checkpointed(model: Any) -> None:
    model.enable_gradient_checkpointing()


def both(model: Any) -> None:
    adapted(model)
    checkpointed(model)


def halved(model: Any) -> None:
    model.to(torch.bfloat16)


SETUPS: dict[str, Setup] = {
    "all weights": lambda model: None, "LoRA": adapted, "checkpointed": checkpointed, "LoRA, checkpointed": both,
    "bf16": halved,
}  # fmt: skip


def trained(name: str, setup: Setup, preset: str | None) -> tuple[Any, list[Tensor | None], int]:
    """The model after a backward, the gradients of all its parameters, and what a batch keeps."""
    model, batch = build(name)
    setup(model)
    dtype = next(model.parameters()).dtype
    numbers = ("hidden_states", "encoder_hidden_states", "pooled_projections", "sample")
    batch = {k: x.to(dtype) if k in numbers else x for k, x in batch.items()}
    if preset is not None:
        patch_model(model, preset)

    def loss() -> Tensor:
        # a velocity to learn, as flow matching has it
        return (model(**batch, return_dict=False)[0].float() - 0.3).square().mean()  # type: ignore[no-any-return]

    loss().backward()
    return model, [p.grad for p in model.parameters()], kept_bytes(loss, "cpu")


@pytest.mark.daily(3)
@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("name", MODELS)
def test_exact(name: str, setup: str) -> None:
    stock, expected, whole = trained(name, SETUPS[setup], None)
    model, found, kept = trained(name, SETUPS[setup], "exact")
    assert [x is None for x in found] == [x is None for x in expected]
    for a, b in zip(found, expected, strict=True):
        bound = 0.0 if name != NOT_BIT_EQUAL else 3e-2 if setup == "bf16" else 2e-6
        assert a is b if b is None else (a - b).norm() <= bound * b.norm()
    limits = {"all weights": SHARES[name][0], "bf16": 0.6, "LoRA": 0.9}
    assert kept <= limits.get(setup, 1.0) * whole
    unpatch_model(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]


@pytest.mark.parametrize("name", MODELS)
def test_int8(name: str) -> None:
    _, expected, whole = trained(name, SETUPS["all weights"], None)
    _, found, kept = trained(name, SETUPS["all weights"], "int8")
    error = sum((a - b).square().sum() for a, b in zip(found, expected, strict=True) if a is not None)
    assert error.sqrt() <= 0.02 * sum(b.square().sum() for b in expected if b is not None).sqrt()
    assert kept <= SHARES[name][1] * whole


def test_tiles_of_mlps_leave_other_blocks_their_plans() -> None:
    """Nothing in Flux can be computed in tiles."""
    kept = [trained("flux", SETUPS["all weights"], preset)[2] for preset in ("exact", "long")]
    assert kept[1] <= kept[0]
