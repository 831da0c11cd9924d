"""A real Trainer on a tiny model: what is logged, that trackers see it, and that it is the true peak."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from hf_actcompress import patch_model
from hf_actcompress.errors import MeasurementError
from hf_actcompress.memory.estimation.estimate import estimate
from hf_actcompress.memory.measurement.training_restored import resident_bytes
from hf_actcompress.training import MemoryCallback
from hf_actcompress.training.memory_callback import KEPT, PEAK, RATIO

BATCH, LENGTH = 2, 16


class Tracker(TrainerCallback):
    """Like the callbacks of `report_to`, it is added before ours."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(dict(logs))


def trainer_for(folder, callbacks=(), steps=4, **options):
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=32, n_positions=LENGTH, vocab_size=64, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    rows = [{"input_ids": (ids := torch.randint(64, (LENGTH,))), "labels": ids} for _ in range(16)]
    arguments = {
        "output_dir": str(folder), "per_device_train_batch_size": BATCH, "max_steps": steps, "logging_steps": 1,
        "report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no",
        "dataloader_pin_memory": False, "learning_rate": 1e-3,
    }  # fmt: skip
    return Trainer(
        GPT2LMHeadModel(config),
        TrainingArguments(**{**arguments, **options}),
        train_dataset=rows,
        eval_dataset=rows[:2],
        callbacks=list(callbacks),
    )


def watch(trainer, **options):
    callback = MemoryCallback(**options)
    trainer.add_callback(callback)
    return callback


def losses(entries):
    return [entry for entry in entries if "loss" in entry]


def test_trackers_see_it_beside_the_loss(tmp_path):
    tracker = Tracker()
    trainer = trainer_for(tmp_path, [tracker], eval_strategy="steps", eval_steps=2)
    watch(trainer, every=2)
    trainer.train()
    for entries in (tracker.seen, trainer.state.log_history):
        logged = losses(entries)
        # steps 1 and 3 were sampled
        assert [PEAK in entry for entry in logged] == [True, False, True, False]
        assert all(0 < entry[KEPT] < entry[PEAK] for entry in logged if PEAK in entry)
        assert not any(PEAK in entry for entry in entries if "loss" not in entry)


def test_a_cpu_samples_the_second_step_alone(tmp_path):
    trainer = trainer_for(tmp_path)
    watch(trainer)
    trainer.train()
    assert [PEAK in entry for entry in losses(trainer.state.log_history)] == [False, True, False, False]


def test_sparse_logs_get_the_highest_since_the_last(tmp_path):
    trainer = trainer_for(tmp_path, logging_steps=4)
    callback = watch(trainer, every=1)
    noted = []
    note = callback._note
    callback._note = lambda key, value: (noted.append((key, value)), note(key, value))
    trainer.train()
    (entry,) = losses(trainer.state.log_history)
    peaks = [value for key, value in noted if key == PEAK]
    # the later steps have optimizer states, two for each weight
    assert len(peaks) == 4 and peaks[1] > peaks[0] and entry[PEAK] == max(peaks)


def test_the_peak_is_that_of_the_allocator(tmp_path):
    """Compares with the same step without the Trainer."""
    from hf_actcompress import measure_step

    trainer = trainer_for(tmp_path, optim="sgd", max_grad_norm=0.0)
    watch(trainer)
    trainer.train()
    logged = losses(trainer.state.log_history)[1]
    model, optimizer = trainer.model, torch.optim.SGD(trainer.model.parameters(), lr=1e-3)
    ids = torch.randint(64, (BATCH, LENGTH))

    def step():
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        model.zero_grad()

    step()
    by_hand = resident_bytes(model, optimizer) + measure_step(step, "cpu").peak_bytes
    # the difference is the Trainer's own scalars: the loss, its mean, the count of items
    assert 0 <= logged[PEAK] - by_hand <= 256


def estimated(nbytes, gradients=0):
    return SimpleNamespace(total_peak_bytes=nbytes, gradients_bytes=gradients, batch_size=BATCH, seq_len=LENGTH)


@pytest.mark.parametrize("factor, warns", [(1.0, False), (1.05, False), (0.8, True), (1.3, True)])
def test_warns_once_when_the_peak_leaves_the_estimate(tmp_path, caplog, factor, warns):
    trainer = trainer_for(tmp_path, steps=3)
    watch(trainer, every=1)
    trainer.train()
    peak = losses(trainer.state.log_history)[-1][PEAK]
    trainer = trainer_for(tmp_path, steps=4)
    watch(trainer, every=1, estimate=estimated(int(peak * factor)))
    with caplog.at_level(logging.WARNING, logger="hf_actcompress"):
        trainer.train()
    logged = losses(trainer.state.log_history)
    # the first step has no optimizer states yet
    assert [RATIO in entry for entry in logged] == [False, True, True, True]
    assert logged[-1][RATIO] == pytest.approx(1 / factor, rel=0.01)
    assert len([r for r in caplog.records if "estimated" in r.getMessage()]) == int(warns)


def test_gradients_that_a_trainer_drops_are_no_reason_to_warn(tmp_path, caplog):
    trainer = trainer_for(tmp_path, steps=2)
    callback = watch(trainer, every=1)
    trainer.train()
    peak = losses(trainer.state.log_history)[-1][PEAK]
    with caplog.at_level(logging.WARNING, logger="hf_actcompress"):
        callback._compare(peak, estimated(int(1.3 * peak), gradients=int(0.3 * peak)))
        assert not caplog.records
        callback._compare(peak, estimated(int(1.3 * peak), gradients=int(0.1 * peak)))
    assert len(caplog.records) == 1


@pytest.mark.parametrize("config", (None, "exact"))
def test_holds_the_estimate(tmp_path, caplog, config):
    trainer = trainer_for(tmp_path, per_device_train_batch_size=8)
    if config is not None:
        patch_model(trainer.model, config)
    expected = estimate(trainer.model, batch_size=8, seq_len=LENGTH, config=config, device="cpu")
    watch(trainer, estimate=expected)
    with caplog.at_level(logging.WARNING, logger="hf_actcompress"):
        trainer.train()
    assert not [r for r in caplog.records if "estimated" in r.getMessage()]
    logged = losses(trainer.state.log_history)[1]
    assert logged[KEPT] == pytest.approx(expected.kept_bytes, rel=0.01)


def test_in_the_list_of_callbacks_trackers_see_it(tmp_path):
    tracker = Tracker()
    trainer = trainer_for(tmp_path, [tracker, MemoryCallback(every=1)], steps=2)
    trainer.train()
    for entries in (tracker.seen, trainer.state.log_history):
        assert [PEAK in entry for entry in losses(entries)] == [True, True]


def test_a_profiler_of_the_user_goes_on(tmp_path):
    """A second profiler would end the first: the steps that it sees are not sampled."""
    trainer = trainer_for(tmp_path, [MemoryCallback(every=1)], steps=2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        trainer.train()
    assert any(event.name == "aten::addmm" for event in profiler.events())
    assert not any(PEAK in entry for entry in trainer.state.log_history)
    trainer.train()
    assert all(PEAK in entry for entry in losses(trainer.state.log_history))


def test_training_is_the_same_and_nothing_stays(tmp_path):
    plain, watched = trainer_for(tmp_path), trainer_for(tmp_path)
    callback = watch(watched, every=1)
    plain.train()
    watched.train()
    assert all(map(torch.equal, plain.model.parameters(), watched.model.parameters()))
    assert not watched.model._forward_hooks and not watched.model._forward_pre_hooks
    assert callback._profiler is None


def test_a_run_that_broke_off_can_start_again(tmp_path):
    trainer = trainer_for(tmp_path, steps=2)
    watch(trainer, every=1)
    forward = trainer.model.transformer.h[1].forward
    trainer.model.transformer.h[1].forward = lambda *args, **kwargs: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    trainer.model.transformer.h[1].forward = forward
    trainer.train()
    assert all(PEAK in entry for entry in losses(trainer.state.log_history))


def test_hooks_on_a_card_see_what_a_forward_keeps(monkeypatch):
    """This runs without a GPU: fixed numbers replace the allocator's statistics."""
    model = torch.nn.Linear(4, 4)
    callback = MemoryCallback()
    args = SimpleNamespace(device=torch.device("cuda"), torch_compile=False)
    state = SimpleNamespace(global_step=0, log_history=[{"loss": 1.0}])
    allocated = iter([100, 350, 350, 500])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(allocated))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 900)
    resets = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    callback.on_train_begin(args, state, None, model=model)
    model(torch.zeros(2, 4))
    callback.on_step_begin(args, state, None, model=model)
    # two batches of an accumulated step
    model(torch.zeros(2, 4))
    model(torch.zeros(2, 4))
    callback.on_step_end(args, state, None)
    logs = {"loss": 1.0}
    callback.on_log(args, state, None, logs=logs)
    assert logs == state.log_history[-1] == {"loss": 1.0, PEAK: 900, KEPT: 250}
    assert len(resets) == 1
    callback.on_train_end(args, state, None)
    assert not model._forward_hooks
    # hooks would break its graph
    model.compile(backend="eager")
    callback.on_train_begin(args, state, None, model=model)
    assert not model._forward_hooks


def test_refusals():
    with pytest.raises(ValueError, match="every"):
        MemoryCallback(every=0)
    with pytest.raises(ValueError, match="tolerance"):
        MemoryCallback(tolerance=0)
    args = SimpleNamespace(device=torch.device("meta"), torch_compile=False)
    with pytest.raises(MeasurementError, match="meta"):
        MemoryCallback().on_train_begin(args, SimpleNamespace(global_step=0), None)


@pytest.mark.gpu
def test_on_a_card(tmp_path):
    trainer = trainer_for(tmp_path, use_cpu=False)
    watch(trainer)
    trainer.train()
    assert all(0 < entry[KEPT] < entry[PEAK] for entry in losses(trainer.state.log_history))
