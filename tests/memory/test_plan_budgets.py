"""Plans for random budgets beside the real step on the CPU: each stays below its budget, and makes use of it.

A few of them are tests. All of them, with what each one uses: ``python -m tests.memory.test_plan_budgets``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_actcompress import measure_step, patch_model
from hf_actcompress.memory import Plan, estimate, plan
from hf_actcompress.memory.planning.options import OPTIONS
from tests.slopes import bert, gpt2, llama

pytestmark = pytest.mark.daily(6)

BUILDS = {
    "bert": bert,
    "gpt2": lambda layers, **options: gpt2(layers, bos_token_id=0, eos_token_id=0, **options),
    "llama": lambda layers, **options: llama(layers, pad_token_id=0, **options),
}
# of the budget
USED = 0.9
SEEDS = range(20)
QUICK = (1, 2, 4, 12, 14, 15)
ALLOWED = (("checkpoint",), ("int8", "checkpoint"), OPTIONS)


@dataclass(frozen=True)
class Case:
    """A training and a share of the way from what checkpointing needs to what "exact" does."""

    family: str
    layers: int
    batch: int
    length: int
    lora: bool
    objective: str
    allow: tuple[str, ...]
    share: float

    @classmethod
    def drawn(cls, seed: int) -> Case:
        draw = random.Random(seed)
        return cls(
            family=sorted(BUILDS)[seed % 3],
            layers=draw.randint(4, 8),
            batch=draw.choice((1, 2, 4)),
            length=draw.choice((64, 96, 128, 256)),
            lora=draw.random() < 0.4,
            objective=draw.choice(("speed", "fidelity")),
            allow=draw.choice(ALLOWED),
            share=draw.uniform(0.05, 0.95),
        )

    def model(self) -> Any:
        model = BUILDS[self.family](self.layers, hidden=128).train()
        return model.to(torch.bfloat16) if self.lora else model

    @property
    def options(self) -> dict[str, Any]:
        adapters = LoraConfig(r=8, target_modules="all-linear") if self.lora else None
        return {"batch_size": self.batch, "seq_len": self.length, "lora": adapters, "device": "cpu"}


def real_peak(case: Case, found: Plan) -> int:
    """Of a step of the model with that plan, above weights and gradients."""
    model = case.model()
    if case.lora:
        model = get_peft_model(model, case.options["lora"])
    patch_model(model, found)
    ids = torch.randint(3, 128, (case.batch, case.length))

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    threads = torch.get_num_threads()
    # on one thread, products in 16 bits have workspaces here, which are none of the step's tensors
    torch.set_num_threads(2)
    try:
        step()
        return measure_step(step, "cpu").peak_bytes
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Outcome:
    """What a plan needs in a real step.

    Args:
        cheaper: Whether a cheaper plan would fit; looked for where much is left.
    """

    case: Case
    budget: int
    needed: int
    chosen: tuple[str, ...]
    cheaper: bool

    def __str__(self) -> str:
        share = f"{self.needed / self.budget:.1%} of {self.budget} bytes"
        more = "; a cheaper plan would fit" if self.cheaper else ""
        return f"{self.case}: {share}, {sorted(set(self.chosen))}{more}"

    def check(self) -> None:
        assert self.needed <= self.budget
        assert self.needed >= USED * self.budget or not self.cheaper


def outcome(seed: int) -> Outcome:
    case = Case.drawn(seed)
    model = case.model()
    low, high = (estimate(model, gradient_checkpointing=again, **case.options).device_bytes for again in (True, False))
    budget = low + int(case.share * (high - low))
    found = plan(model, budget=budget, headroom=0.0, objective=case.objective, allow=case.allow, **case.options)
    needed = found.estimate.state_bytes + real_peak(case, found)
    cheaper = needed < USED * budget and cheaper_fits(case, model, found)
    return Outcome(case, budget, needed, tuple(row.option for row in found.rows), cheaper)


def cheaper_fits(case: Case, model: Any, found: Plan) -> bool:
    """Whether the same plan fits with one layer less that is checkpointed or compressed."""
    config = found.config
    # those that are less exact come first
    last = {row.option: row.layer for row in found.rows if row.option != "exact"}
    for layer in last.values():
        less = replace(
            config,
            checkpoint=tuple(name for name in config.checkpoint if name != layer),
            overrides=tuple(row for row in config.overrides if row[0] != layer),
        )
        if estimate(model, config=less, **case.options).device_bytes <= found.budget_bytes:
            return True
    return False


@pytest.mark.parametrize("seed", QUICK)
def test_a_plan_stays_below_its_budget_and_uses_it(seed):
    found = outcome(seed)
    print(found)
    found.check()


if __name__ == "__main__":
    for seed in SEEDS:
        print(seed, outcome(seed), flush=True)
