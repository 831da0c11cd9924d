"""find_batch_size: its search, compared with measured peaks and exact formulas; its report, and what it refuses."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_actcompress.errors import MeasurementError
from hf_actcompress.memory import find_batch_size, longest_batches, measure_step
from hf_actcompress.memory.batch_size.find import out_of_memory
from hf_actcompress.memory.batch_size.report import BatchSizeTrial
from hf_actcompress.memory.batch_size.search import Search
from hf_actcompress.memory.measurement.training_restored import resident_bytes
from tests.memory.small_training import LENGTH, make_batch, training


def true_peak(batch_size: int) -> int:
    """All bytes that are allocated at the highest point of the first two steps."""
    model, optimizer, step = training()
    batch = make_batch(batch_size)
    peaks = []
    for _ in range(2):
        there = resident_bytes(model, optimizer) + sum(x.nbytes for x in batch.values())
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


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 10**5), st.integers(0, 10**6), st.integers(0, 10**8), st.integers(1, 600),
    st.booleans(),
)  # fmt: skip
def test_the_search_is_exact_for_affine_peaks(state, slope, offset, room, start, measured):
    """The peak of a batch that does not fit may be known (with a byte budget) or not (on a card that ran out)."""
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
    # a trial may be at most 16 times as large as the one before
    assert search.settled(limit) or best > 16 * start or not measured


@pytest.mark.parametrize(
    ("state", "floor", "slope", "room"),
    [(2010, 2690, 203, 12288), (2010, 2690, 88, 12288), (750, 1000, 281, 24576), (2010, 2690, 480, 12288)],
    ids=["bert-large", "bert-large, checkpointed", "gpt2", "bert-large, stock"],
)
def test_small_batches_whose_peak_is_the_optimizers(state, floor, slope, room):
    """Peaks in MiB as on a GPU, where the allocator runs out of memory a little below the limit, without a peak.

    Their first peaks do not grow with the batch. Four trials find 85% of the largest batch.
    """
    usable = int(0.97 * room)
    search = Search(1, None, 4)
    while (size := search.candidate(room)) is not None:
        peak = max(floor, state + slope * size)
        search.add(BatchSizeTrial(size, peak <= usable, peak if peak <= usable else None, 1.0), state)
    largest = max(trial.batch_size for trial in search.tried if trial.fits)
    assert largest >= 0.85 * ((usable - state) // slope)


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


def test_the_longest_samples_of_a_data_set():
    """Samples are collated as in the training. A short data set is repeated. Samples without a length are refused."""
    data = [{"input_ids": list(range(n)), "size": 10 - n} for n in (3, 7, 1, 5)]

    def collate(samples):
        width = max(len(sample["input_ids"]) for sample in samples)
        rows = [sample["input_ids"] + [0] * (width - len(sample["input_ids"])) for sample in samples]
        return {"input_ids": torch.tensor(rows), "kinds": "text"}

    make = longest_batches(data, collate)
    assert make(1)["input_ids"].shape == (1, 7) and make(1)["kinds"] == "text"
    assert sorted((x != 0).sum().item() + 1 for x in make(2)["input_ids"]) == [5, 7]
    assert make(6)["input_ids"].shape == (6, 7)
    assert longest_batches(data, collate, length="size")(1)["input_ids"].shape == (1, 1)
    assert longest_batches(data, collate, length=lambda sample: -len(sample["input_ids"]))(1)["input_ids"].numel() == 1
    with pytest.raises(ValueError, match="no 'input_ids'"):
        longest_batches([{"pixels": 1}], collate)
    with pytest.raises(ValueError, match="empty"):
        longest_batches([], collate)
