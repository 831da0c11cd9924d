"""Every preset together with LoRA, autocast, checkpointing, accumulated gradients and torch.compile.

DDP is in test_distributed.py. test_presets.py checks the gradient error of each preset alone; here the error must not
grow in combination with something else.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import GELUActivation

from hf_actcompress import PRESETS, kept_bytes, patch_model
from hf_actcompress.compilation import backend
from hf_actcompress.models.root import root_of
from hf_actcompress.reference import rng
from tests.families import BY_NAME, Family, Gradients, differing, relative_error
from tests.test_presets import ERRORS

# presets that keep something other than the inputs of activations and norms, which has no effect on a gated MLP
VARIANTS = ("tempo", "inverted", "fewbit", "forward_ad")
# largest gradient errors on these models, with a margin for another platform's rounding
LIMITS = {**ERRORS, "adaptive": ERRORS["int4"], "fewbit": 0.3}
# estimators: their gradient errors are large, and average out over steps for some of them only
ESTIMATES = ("dropit", "blocksparse", "pooled", "sampled", "wtacrs", "actnn")
# presets that draw random numbers
STOCHASTIC = ("sampled", "wtacrs", "actnn", "mesa", "gact")

every_preset = pytest.mark.parametrize("preset", PRESETS)
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.daily(4)]


@pytest.fixture(autouse=True)
def only_the_models_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away the generators of the process: a patched model must draw from its own ones only."""
    monkeypatch.setattr(rng, "_process", None)


def gradients(
    model: Any, batch: dict[str, Tensor], dtype: torch.dtype | None = None, draw: int = 7
) -> tuple[Tensor, Gradients]:
    """The loss and what is in `.grad` afterwards, always with the same masks; codecs draw from the seed `draw`."""
    torch.manual_seed(7)
    root = root_of(model)
    if root is not None:
        root.generators.restart(draw)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        out = model(**batch)
    loss = getattr(out, "loss", out)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def mean_gradients(
    model: Any, batch: dict[str, Tensor], dtype: torch.dtype | None, draws: int
) -> tuple[Tensor, Gradients]:
    """As `gradients`, but the mean over several draws: an estimator has to be right in the mean, not in one draw."""
    mean: Gradients = {}
    for draw in range(draws):
        model.zero_grad()
        loss, found = gradients(model, batch, dtype, draw)
        mean = {name: g / draws + mean.get(name, 0) for name, g in found.items()}
    return loss, mean


def error(found: Gradients, exact: Gradients) -> float:
    assert found.keys() == exact.keys()
    assert all(g.isfinite().all() for g in found.values())
    return relative_error(found, {n: g.double() for n, g in exact.items()})


def norm(grads: Gradients) -> float:
    return sum(float(g.double().square().sum()) for g in grads.values()) ** 0.5


def lora(model: Any, family: Family) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    task = "CAUSAL_LM" if family.task == "causal" else None
    options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "lora_dropout": 0.05}
    return peft.get_peft_model(model, peft.LoraConfig(**options, task_type=task))


def checkpointing(model: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def family_of(preset: str) -> Family:
    return BY_NAME["bert" if preset in VARIANTS else "llama"]


@every_preset
@pytest.mark.parametrize("company", ["bf16", "fp16", "checkpointing"])
def test_the_error_stays_what_it_is(preset: str, company: str) -> None:
    family = family_of(preset)
    stock, batch = family.build(dropout=0.1), family.make_batch("none")
    _, exact = gradients(copy.deepcopy(stock), batch)
    alone = error(gradients(patch_model(copy.deepcopy(stock), preset), batch)[1], exact)
    if company == "checkpointing":
        checkpointing(stock)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(company)
    loss, exact = gradients(copy.deepcopy(stock), batch, dtype)
    ours_loss, found = gradients(patch_model(stock, preset), batch, dtype)
    assert torch.equal(ours_loss, loss)
    # the loss head of "exact" adds up in fp32 where stock does in the autocast dtype
    own = torch.finfo(dtype).eps if dtype is not None else 1e-6
    assert error(found, exact) <= 2 * alone + own


@every_preset
@pytest.mark.parametrize("also_checkpointing", [False, True])
def test_lora(preset: str, also_checkpointing: bool) -> None:
    """Only the adapters are trained, with dropout in them; also with checkpointing and autocast, as QLoRA runs."""
    family = family_of(preset)
    stock, batch = lora(family.build(dropout=0.1), family), family.make_batch("none")
    dtype = None
    if also_checkpointing:
        checkpointing(stock).enable_input_require_grads()
        dtype = torch.bfloat16
    ours = patch_model(copy.deepcopy(stock), preset)
    loss, exact = gradients(stock, batch, dtype)
    ours_loss, found = mean_gradients(ours, batch, dtype, 4 if preset in STOCHASTIC else 1)
    assert torch.equal(ours_loss, loss) and all("lora_" in name for name in exact)
    if preset not in ESTIMATES:
        assert error(found, exact) < LIMITS[preset]
    else:
        cosine = sum(float((found[n] * exact[n]).sum()) for n in exact) / (norm(found) * norm(exact))
        assert error(found, exact) > 0 and cosine > 0.3


@every_preset
def test_gradients_add_up_over_micro_batches(preset: str) -> None:
    family = family_of(preset)
    model = patch_model(family.build(dropout=0.1), preset)
    batches = [family.make_batch("right", seed) for seed in range(3)]
    expected: Gradients = {}
    # the expected sum is computed by a copy, because some codecs learn from earlier batches, as the ranges of "mesa" do
    other = copy.deepcopy(model)
    for batch in batches:
        for name, g in gradients(other, batch)[1].items():
            expected[name] = expected[name] + g if name in expected else g
        other.zero_grad()
    for batch in batches:
        found = gradients(model, batch)[1]
    assert not differing(found, expected)


class Block(nn.Module):
    """A norm and an MLP: every role except attention, which stays stock under torch.compile."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(width), GELUActivation()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (x + self.down(self.act(self.up(self.norm(x))))).square().mean()
        return loss


# "exact" is compiled in test_compile.py, and every format of "adaptive" is also one of "int4"
@pytest.mark.parametrize("preset", [name for name in PRESETS if name not in ("exact", "adaptive")])
def test_compile(preset: str) -> None:
    """The model compiles to one graph, which keeps codes too. The compiler decides what it computes again."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    stock, x = Block(), torch.randn(2, 40, 32)
    ours = patch_model(copy.deepcopy(stock), preset)
    (loss, exact), (_, alone) = gradients(stock, {"x": x}), gradients(ours, {"x": x})
    ours.zero_grad()
    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    ours_loss, found = gradients(compiled, {"x": x})
    found = {name.removeprefix("_orig_mod."): g for name, g in found.items()}
    assert torch.equal(ours_loss, loss)
    # a compiled graph draws from another generator
    assert error(found, exact) <= (1.5 if preset in STOCHASTIC else 1) * error(alone, exact) + 1e-6
    kept, before = (
        kept_bytes(lambda model=model: model(x=x.clone().requires_grad_()), "cpu") for model in (compiled, stock)
    )
    assert kept < 0.5 * before if preset in ("int8", "int4", "fp8") else kept <= before
