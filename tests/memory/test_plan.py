"""Plans beside the real step: what they promise, and the pieces that they are made of."""

from __future__ import annotations

import itertools
import random
from functools import lru_cache
from typing import Any

import pytest
import torch

from hf_actcompress import patch_report
from hf_actcompress.errors import DoesNotFitError, MeasurementError, UnknownOptionError, UnsupportedModelError
from hf_actcompress.memory import Plan, estimate, max_batch_size, max_seq_len, plan
from hf_actcompress.memory.planning.costs import DeviceModel, Work, checkpoint_time, codec_error, storage_time
from hf_actcompress.memory.planning.knapsack import Weighed, choose, undominated
from hf_actcompress.memory.planning.options import LayerOption
from tests.memory.planned_steps import peak_with
from tests.slopes import gpt2

SIZES = {"batch_size": 2, "seq_len": 128}
LAYERS = 4


@lru_cache
def model() -> Any:
    return gpt2(LAYERS, hidden=128, bos_token_id=0, eos_token_id=0).train()


@lru_cache
def needed(checkpointing: bool) -> int:
    if not checkpointing:
        return estimate(model(), **SIZES, device="cpu").device_bytes
    # the flag of the copy, not the model's own
    return estimate(model().config, **SIZES, device="cpu", gradient_checkpointing=True).device_bytes


def planned(budget: int, **options: Any) -> Plan:
    # budgets here are what estimates say to the byte, so nothing is left free
    options = {"headroom": 0.0, **options}
    return plan(model(), **SIZES, budget=budget, device="cpu", allow=("int8", "checkpoint"), **options)


@pytest.mark.parametrize(("share", "objective"), [(0.6, "speed"), (0.3, "fidelity")])
def test_a_plan_fits_in_the_real_step_and_serialises(share, objective, tmp_path, capsys):
    budget = needed(True) + int(share * (needed(False) - needed(True)))
    found = planned(budget, objective=objective)
    state = found.estimate.state_bytes
    roles: set[str] = set()

    def look(patched: Any) -> None:
        roles.update(row.role for row in patch_report(patched).patched)

    peak = peak_with(found, model(), torch.randint(3, 128, (2, 128)), look)
    assert roles & {"checkpoint", "norm"}
    assert state + peak <= budget
    assert found.estimate.step_peak_bytes == pytest.approx(peak, rel=0.05)
    if objective == "fidelity":
        assert found.error == 0
    assert Plan.from_json(found.to_json()) == found
    found.print()
    assert "needs" in capsys.readouterr().out
    found.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 0


def test_inputs_of_checkpointed_layers_are_compressed_where_nothing_else_fits():
    """Below what checkpointing needs: and the step then stays there, on the allocator."""
    whole = plan(model(), **SIZES, budget=needed(False), headroom=0.0, device="cpu", allow=("checkpoint",))
    floor = [plan_floor(allow) for allow in (("checkpoint",), ("checkpoint", "compressed_checkpoint"))]
    assert floor[1] < floor[0] < whole.estimate.device_bytes
    found = plan(
        model(), **SIZES, budget=floor[1], headroom=0.0, device="cpu", allow=("checkpoint", "compressed_checkpoint")
    )
    assert sum(row.option == "compressed_checkpoint" for row in found.rows) >= LAYERS - 1
    assert 0 < found.error < 0.01 and not found.config.lossless
    peak = peak_with(found, model(), torch.randint(3, 128, (2, 128)))
    assert found.estimate.state_bytes + peak <= floor[1]


def test_attention_is_kept_where_there_is_room_for_it():
    """Its kernel does not run again then, so such a layer takes less time; the step stays within the budget."""
    allow = ("checkpoint", "checkpoint_with_attention")
    floor = plan_floor(("checkpoint",))
    least = plan(model(), **SIZES, budget=floor, headroom=0.0, device="cpu", allow=allow)
    budget = floor + (needed(False) - floor) // 4
    plain = plan(model(), **SIZES, budget=budget, headroom=0.0, device="cpu", allow=allow[:1])
    found = plan(model(), **SIZES, budget=budget, headroom=0.0, device="cpu", allow=allow)
    assert {row.option for row in least.rows} == {"checkpoint"}
    kept = [row.layer for row in found.rows if row.option == "checkpoint_with_attention"]
    assert kept and found.time < plain.time and found.config.lossless
    reported: set[str] = set()

    def look(patched: Any) -> None:
        reported.update(row.name for row in patch_report(patched).rows if row.role == "checkpoint_input")

    peak = peak_with(found, model(), torch.randint(3, 128, (2, 128)), look)
    assert {name.removeprefix("transformer.") for name in reported} == {
        name.removeprefix("transformer.") for name in kept
    }
    assert found.estimate.state_bytes + peak <= budget


def test_inputs_of_checkpointed_layers_go_to_the_host_where_the_card_is_full():
    allow = ("checkpoint", "offloaded_checkpoint")
    floor = [plan_floor(names, device="cuda") for names in (allow[:1], allow)]
    assert floor[1] < floor[0]
    roomy = plan(model(), **SIZES, budget=floor[0], headroom=0.0, device="cuda", allow=allow)
    assert {row.option for row in roomy.rows} == {"checkpoint"}
    found = plan(model(), **SIZES, budget=floor[1], headroom=0.0, device="cuda", allow=allow)
    assert "offloaded_checkpoint" in {row.option for row in found.rows}
    # a little slower than without the copies, and as exact
    assert found.time > roomy.time and found.config.lossless and found.config.offloads


@lru_cache
def plan_floor(allow: tuple[str, ...], device: str = "cpu") -> int:
    """The least budget for which there is a plan."""
    with pytest.raises(DoesNotFitError) as caught:
        plan(model(), **SIZES, budget=1, headroom=0.0, device=device, allow=allow)
    return 1 + caught.value.missing_bytes


def test_speed_asks_for_lossy_plans_and_says_what_they_save():
    """An error is no price of time: it decides between plans that take the same time alone."""
    # packing is fast, so that it takes less time than a second forward
    options: dict[str, Any] = {"device_model": DeviceModel(bandwidth=1e16)}
    budget = needed(True) + (needed(False) - needed(True)) // 2
    exact, fast = planned(budget, **options), planned(budget, objective="speed", **options)
    assert exact.error == 0 and exact.exact_time is None and "gradients exact" in str(exact)
    assert fast.error > 0 and fast.estimate.device_bytes <= budget
    assert fast.exact_time == pytest.approx(exact.time) and fast.time < exact.time
    assert f"saves {exact.time - fast.time:.1%} beside the fastest exact plan" in str(fast)
    assert Plan.from_json(fast.to_json()) == fast
    # lossy ways that are as slow as they are here save nothing
    slow = planned(budget, objective="speed", device_model=DeviceModel(bandwidth=1e9))
    assert slow.error == 0
    below = plan_floor(("checkpoint",)) - 1
    allow = ("checkpoint", "compressed_checkpoint")
    for objective in ("fidelity", "speed"):
        found = plan(model(), **SIZES, budget=below, headroom=0.0, device="cpu", allow=allow, objective=objective)
        assert found.error > 0 and found.exact_time is None and "no exact plan fits" in str(found)


def test_what_an_error_costs():
    costs = {
        objective: [LayerOption("", (), 1, *x).weighed(objective).cost for x in ((0.1, 0.5), (0.11, 0.0), (0.1, 0.4))]
        for objective in ("speed", "fidelity")
    }
    assert sorted(range(3), key=costs["speed"].__getitem__) == [2, 0, 1]
    assert sorted(range(3), key=costs["fidelity"].__getitem__) == [1, 2, 0]


def test_with_enough_memory_nothing_is_done():
    found = planned(needed(False))
    assert {row.option for row in found.rows} == {"exact"}
    assert found.config.lossless and not found.config.overrides and not found.config.checkpoint
    assert found.time == found.error == 0


def test_a_share_of_the_card_is_left_free():
    budget = needed(False)
    found = planned(budget, headroom=0.08)
    assert found.estimate.device_bytes <= 0.92 * budget and found.budget_bytes == budget
    with pytest.raises(DoesNotFitError, match=r"of which 8% stay free"):
        plan(model(), **SIZES, budget=needed(True), device="cpu", allow=("checkpoint",))
    with pytest.raises(UnknownOptionError, match="headroom"):
        planned(budget, headroom=1.0)


def test_what_does_not_fit_says_by_how_much_and_what_would():
    budget = needed(True) - (needed(False) - needed(True)) // 3
    with pytest.raises(DoesNotFitError, match="would fit") as caught:
        plan(model(), **SIZES, budget=budget, headroom=0.0, device="cpu", allow=("checkpoint",))
    error = caught.value
    assert error.missing_bytes > 0 and (error.batch_size == 1 or error.seq_len < 128)
    config = model().config
    options = {"device": "cpu", "gradient_checkpointing": True}
    for batch, length in ((error.batch_size, 128), (2, error.seq_len)):
        if batch and length:
            assert estimate(config, batch_size=batch, seq_len=length, **options).device_bytes <= budget


def test_the_largest_batch_and_sequence():
    budget = 3 * needed(False)
    options = {"device": "cpu", "config": "stock"}
    batch = max_batch_size(model(), seq_len=128, budget=budget, **options)
    sizes = [estimate(model(), batch_size=b, seq_len=128, **options).device_bytes for b in (batch, batch + 1)]
    assert sizes[0] <= budget < sizes[1]
    length = max_seq_len(model(), batch_size=2, budget=budget, step=32, limit=640, **options)
    sizes = [estimate(model(), batch_size=2, seq_len=s, **options).device_bytes for s in (length, length + 32)]
    assert length % 32 == 0 and sizes[0] <= budget and (length == 640 or budget < sizes[1])


@pytest.mark.parametrize("seed", range(10))
def test_the_choice_is_the_cheapest_of_all(seed):
    draw = random.Random(seed)
    layers = [
        [Weighed(draw.randint(0, 40), draw.random()) for _ in range(draw.randint(1, 4))]
        for _ in range(draw.randint(1, 5))
    ]
    capacity = draw.randint(0, 120)
    every = [
        [options[i] for options, i in zip(layers, picks, strict=True)]
        for picks in itertools.product(*(range(len(options)) for options in layers))
    ]
    fitting = [sum(o.cost for o in picks) for picks in every if sum(o.nbytes for o in picks) <= capacity]
    found = choose(layers, capacity)
    if not fitting:
        assert found is None
        return
    assert found is not None
    picked = [options[i] for options, i in zip(layers, found, strict=True)]
    assert sum(o.nbytes for o in picked) <= capacity
    assert sum(o.cost for o in picked) == pytest.approx(min(fitting))


def test_rounding_never_breaks_the_capacity():
    # odd sizes near 2^33: units of many bytes
    layers = [[Weighed(2**33 // 40 + 1, 0.0), Weighed(2**33 // 90 + 1, 1.0)]] * 64
    found = choose(layers, 2**33)
    assert found is not None
    assert sum(layers[0][i].nbytes for i in found) <= 2**33
    # 18 large ones would fit but for the rounding of each to a unit
    assert sum(i == 0 for i in found) >= 17


def test_options_that_another_one_beats_are_left_out():
    options = [Weighed(5, 1.0), Weighed(3, 2.0), Weighed(4, 2.0), Weighed(5, 3.0), Weighed(9, 0.0)]
    assert [options[i] for i in undominated(options)] == [options[1], options[0], options[4]]


def test_costs_are_those_of_the_table():
    work, device = Work(9e12, 1e12, 2e13), DeviceModel(flops=1e14, bandwidth=1e12, host_bandwidth=1e11)
    # a forward of 0.1 s, a layer of 0.3 s
    assert checkpoint_time(work) == pytest.approx(1 / 3)
    raw, packed = {"norm": 30 * 10**9}, {"norm": 15 * 10**9}
    assert storage_time(work, raw, packed, set(), device) == pytest.approx(2 * 45e9 / 1e12 / 0.3)
    assert checkpoint_time(work, attention_again=False) == pytest.approx(0.3)
    # 0.3 s of copies each way, beside 0.1 s of forward and 0.2 s of backward
    assert storage_time(work, raw, {"norm": 0}, {"norm"}, device) == pytest.approx((0.2 + 0.1 + 60e9 / 1e12) / 0.3)
    assert storage_time(work, {"attention": 0}, {"attention": 0}, set(), device) == pytest.approx(0.01 / 0.3)
    assert 0 == codec_error("identity") == codec_error("offload")
    assert codec_error("int8") < codec_error("fp8_e4m3") < codec_error("int4")


@pytest.mark.parametrize("options", [{"objective": "fun"}, {"allow": ("int3",)}, {"optimizer": "adamm"}])
def test_unknown_options_are_named(options):
    with pytest.raises(UnknownOptionError, match="known"):
        plan(model(), **SIZES, budget="1GiB", **options)


def test_what_cannot_be_planned():
    with pytest.raises(UnsupportedModelError, match="one kind"):
        plan(gpt2(1, hidden=64), **SIZES, budget="1GiB", device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(MeasurementError, match="22GiB"):
            plan(model(), **SIZES)
