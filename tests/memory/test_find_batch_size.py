"""The search itself, against oracles that try everything; and that it leaves no trace."""

from __future__ import annotations

import gc
import json
import logging
import random
import weakref

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_actcompress.errors import MeasurementError
from hf_actcompress.memory import find_batch_size, measure_step
from hf_actcompress.memory.batch_size import out_of_memory
from hf_actcompress.memory.batch_size_report import BatchSizeTrial
from hf_actcompress.memory.batch_size_search import Search
from hf_actcompress.memory.restored import resident_bytes, training_restored

WIDTH, LENGTH = 32, 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.up, self.drop, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) * self.frozen
        x = x + self.down(self.drop(nn.functional.gelu(self.up(x))))
        return self.norm(x.transpose(1, 2)).square().mean()


def make_batch(batch_size: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(50, (batch_size, LENGTH))}


def training(seed: int = 0, fits: int | None = None):
    """A model, an optimizer, and a step that runs out of memory in the middle above a batch size."""
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(batch):
        loss = model(**batch)
        random.random(), numpy.random.rand()
        loss.backward()
        if fits is not None and len(batch["input_ids"]) > fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nand so on")
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def true_peak(batch_size: int) -> int:
    """All that is there at the highest point of the first two steps."""
    model, optimizer, step = training()
    batch = make_batch(batch_size)
    peaks = []
    for _ in range(2):
        there = resident_bytes(model, optimizer, batch.values())
        peaks.append(there + measure_step(lambda: step(batch), "cpu").peak_bytes)
    return max(peaks)


@pytest.mark.parametrize("batch_size", (3, 41, 100))
def test_finds_the_largest_that_fits_in_four_trials(batch_size):
    budget = (true_peak(batch_size) + true_peak(batch_size + 1)) // 2
    model, optimizer, step = training()
    report = find_batch_size(model, make_batch, step, optimizer=optimizer, budget=budget, timed_steps=1)
    assert report.largest == batch_size
    assert report.settled and len(report.trials) <= 4
    trial = next(trial for trial in report.trials if trial.batch_size == batch_size)
    assert trial.peak_bytes == true_peak(batch_size)
    assert report.fastest in {trial.batch_size for trial in report.trials if trial.fits}


def test_an_estimate_saves_trials_and_they_go_to_throughput():
    model, optimizer, step = training()
    budget = true_peak(40)
    report = find_batch_size(model, make_batch, step, optimizer=optimizer, budget=budget, start=40, timed_steps=1)
    assert [trial.batch_size for trial in report.trials] == [40, 20]
    assert report.largest == 40 and report.settled


def test_largest_is_a_bound():
    model, optimizer, step = training()
    report = find_batch_size(model, make_batch, step, optimizer=optimizer, budget="1GiB", largest=6, timed_steps=1)
    assert report.largest == 6 and report.settled


def test_nothing_fits():
    model, optimizer, step = training()
    report = find_batch_size(model, make_batch, step, optimizer=optimizer, budget=10_000, start=8)
    assert (report.largest, report.fastest) == (0, 0)
    assert report.trials[-1].batch_size == 1
    assert "no batch size" in str(report)


def state_of(model, optimizer):
    modules = [module.training for module in model.modules()]
    grads = [None if p.grad is None else (id(p.grad), p.grad.clone()) for p in model.parameters()]
    weights = [(id(x), x.detach().clone()) for x in (*model.parameters(), *model.buffers())]
    states = [(k, id(v), v.clone()) for s in optimizer.state.values() for k, v in s.items()]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    draws = (torch.get_rng_state(), random.getstate(), numpy.random.get_state())
    return [modules, grads, weights, states, groups, draws]


def equal(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, numpy.ndarray):
        return numpy.array_equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@pytest.mark.parametrize("before", ("new", "mid_training"))
@pytest.mark.parametrize("fits", (None, 5))
def test_leaves_everything_as_found(before, fits):
    model, optimizer, step = training(fits=fits)
    if before == "mid_training":
        for _ in range(2):
            step(make_batch(2))
        model(**make_batch(2)).backward()
        model.drop.eval()
    found = state_of(model, optimizer)
    changes_lr = optimizer.param_groups[0]

    def changing(batch):
        model.train()
        changes_lr["lr"] *= 0.5
        step(batch)

    report = find_batch_size(
        model, make_batch, changing, optimizer=optimizer, budget="1GiB", largest=12, start=8, timed_steps=1
    )
    assert any(not trial.fits for trial in report.trials) == (fits is not None)
    assert equal(found, state_of(model, optimizer))


def test_out_of_memory_is_caught_and_frees_what_the_step_held():
    model, optimizer, step = training(fits=5)
    held = []

    def watched(batch):
        activation = torch.zeros(1000)
        held.append(weakref.ref(activation))
        step(batch)

    report = find_batch_size(model, make_batch, watched, optimizer=optimizer, budget="1GiB", start=8, timed_steps=1)
    assert report.trials[0].reason == "CUDA out of memory. Tried to allocate 2.00 GiB"
    assert report.trials[0].peak_bytes is None
    assert 1 <= report.largest <= 5
    gc.collect()
    assert len(held) > 4 and all(reference() is None for reference in held)


def test_other_errors_are_the_callers_and_the_model_comes_back():
    model, optimizer, step = training()
    found = state_of(model, optimizer)

    def broken(batch):
        step(batch)
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        find_batch_size(model, make_batch, broken, optimizer=optimizer, budget="1GiB")
    assert equal(found, state_of(model, optimizer))


def test_every_trial_is_logged(caplog):
    model, optimizer, step = training(fits=5)
    with caplog.at_level(logging.INFO, logger="hf_actcompress"):
        report = find_batch_size(model, make_batch, step, optimizer=optimizer, budget="1GiB", start=8, timed_steps=1)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [*map(str, report.trials), str(report)]
    assert any("tokens/s" in message for message in messages)


def test_the_report_prints_and_serialises(capsys):
    trials = (
        BatchSizeTrial(8, True, 1000, 2.0, 64),
        BatchSizeTrial(16, True, 2000, 5.0, 128),
        BatchSizeTrial(32, False, None, reason="out"),
    )
    model, optimizer, step = training()
    report = find_batch_size(model, make_batch, step, optimizer=optimizer, budget="1MiB", trials=1, timed_steps=1)
    report = type(report)(trials, 3000, False)
    assert (report.largest, report.fastest) == (16, 8)
    data = json.loads(report.to_json())
    assert data["largest"] == 16 and data["trials"][0]["tokens_per_second"] == 32.0
    report.print()
    shown = capsys.readouterr().out
    assert "no: out" in shown and "a larger one may" in shown and "\x1b" not in shown


def test_tokens_are_those_that_are_no_padding():
    model, optimizer, step = training()

    def padded(batch_size):
        mask = torch.ones(batch_size, LENGTH, dtype=torch.long)
        mask[:, LENGTH // 2 :] = 0
        return {**make_batch(batch_size), "attention_mask": mask}

    report = find_batch_size(
        model, padded, lambda batch: step({"input_ids": batch["input_ids"]}), budget="1GiB", largest=1, timed_steps=1
    )
    assert report.trials[0].tokens == LENGTH // 2


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "budget"),
        ({"budget": "many"}, "no size"),
        ({"budget": "0GiB"}, "above 0"),
        ({"budget": "1GiB", "start": 0}, "start"),
        ({"budget": "1GiB", "timed_steps": 0}, "timed_steps"),
    ],
)
def test_refusals(options, message):
    model, _, step = training()
    with pytest.raises((MeasurementError, ValueError), match=message):
        find_batch_size(model, make_batch, step, **options)


def test_out_of_memory_errors_are_told_from_others():
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert out_of_memory(caught.value)


def test_training_goes_on_as_if_nothing_had_been():
    losses = []
    for look in (False, True):
        model, optimizer, step = training()
        torch.manual_seed(1)
        for index in range(4):
            if look and index == 2:
                find_batch_size(model, make_batch, step, optimizer=optimizer, budget="1GiB", largest=3, timed_steps=1)
            step(make_batch(4))
        losses.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *losses))


def test_restore_can_be_called_inside():
    model, optimizer, step = training()
    with training_restored(model, optimizer) as restore:
        before = model.up.weight.detach().clone()
        step(make_batch(2))
        assert not torch.equal(before, model.up.weight)
        restore()
        assert torch.equal(before, model.up.weight) and not optimizer.state


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 10**5), st.integers(0, 10**6), st.integers(0, 10**8), st.integers(1, 600),
    st.booleans(),
)  # fmt: skip
def test_the_search_is_exact_for_affine_peaks(state, slope, offset, room, start, measured):
    """Whether the peak of what does not fit is known (a byte budget) or not (a card that ran out)."""
    limit = state + offset + slope + room
    best = (limit - state - offset) // slope
    search = Search(start, None, 12)
    while (candidate := search.candidate(limit)) is not None:
        assert candidate >= 1 and all(trial.batch_size != candidate for trial in search.tried)
        peak = state + offset + slope * candidate
        fits = peak <= limit
        search.add(BatchSizeTrial(candidate, fits, peak if fits or measured else None), state)
    found = max((trial.batch_size for trial in search.tried if trial.fits), default=0)
    assert found <= best
    if search.settled(limit):
        assert found == best
    # growth is bound to 16 times per trial
    assert search.settled(limit) or best > 16 * start or not measured


@pytest.mark.gpu
def test_on_a_card_without_a_budget():
    model = nn.Sequential(nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 4096)).cuda()
    torch.cuda.set_per_process_memory_fraction(0.1)
    try:
        allocated = torch.cuda.memory_allocated()
        report = find_batch_size(
            model,
            lambda n: torch.randn(n, 1024, 4096, device="cuda"),
            lambda x: model(x).square().mean().backward(),
            budget=int(0.1 * torch.cuda.get_device_properties(0).total_memory),
        )
        assert report.largest > 0 and torch.cuda.memory_allocated() == allocated
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
