"""A real Trainer with `ActCompressCallback`: how it gets there, what it says and logs, and its defaults."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from transformers import Trainer
from transformers.utils import logging

import hf_actcompress.training  # noqa: F401  it adds the name for report_to
from hf_actcompress import patch_model, patch_report
from hf_actcompress.config import resolve
from hf_actcompress.errors import NotPatchedError
from hf_actcompress.training import ActCompressCallback, MemoryCallback
from hf_actcompress.training.memory_callback import KEPT, PEAK, RATIO
from tests.training.test_memory_callback import Tracker, estimated, losses, trainer_for

LINE = "hf_actcompress: patched 2 layers, exact\n"


@pytest.fixture(autouse=True)
def verbosity():
    """A Trainer sets the level of transformers' loggers, and leaves it so."""
    before = logging.get_verbosity()
    logging.set_verbosity_warning()
    yield
    logging.set_verbosity(before)


def test_its_defaults_are_those_of_patch_model(tmp_path):
    stock = inspect.signature(patch_model).parameters
    ours = inspect.signature(ActCompressCallback).parameters
    assert {name: ours[name].default for name in ("config", "strict")} == {
        name: stock[name].default for name in ("config", "strict")
    }
    by_callback = trainer_for(tmp_path, [ActCompressCallback()]).model
    by_hand = patch_model(trainer_for(tmp_path).model)
    assert patch_report(by_callback) == patch_report(by_hand)
    roots = [model.__dict__["forward"] for model in (by_callback, by_hand)]
    assert roots[0].config == roots[1].config == resolve("exact")
    # the seeds of stochastic codecs
    assert roots[0].generators.seed == roots[1].generators.seed


def test_arguments_alone_do_it(tmp_path, capsys):
    """The one line of the README: no callback is passed."""
    trainer = trainer_for(tmp_path, report_to="actcompress")
    trainer.train()
    assert capsys.readouterr().out.startswith(LINE)
    assert len(patch_report(trainer.model).patched) > 2
    assert PEAK in losses(trainer.state.log_history)[1]
    # others get none
    with pytest.raises(NotPatchedError):
        patch_report(trainer_for(tmp_path).model)


def test_trackers_get_the_memory_without_a_second_call(tmp_path):
    tracker = Tracker()
    trainer = trainer_for(tmp_path, [tracker, ActCompressCallback()])
    trainer.train()
    for entries in (tracker.seen, trainer.state.log_history):
        assert [PEAK in entry for entry in losses(entries)] == [False, True, False, False]
    seen = losses(tracker.seen)[1]
    stock = trainer_for(tmp_path, [MemoryCallback()])
    stock.train()
    assert 0 < seen[KEPT] < losses(stock.state.log_history)[1][KEPT]


def test_it_can_be_switched_off_and_left_to_another(tmp_path):
    trainer = trainer_for(tmp_path, [ActCompressCallback(log_memory=False)])
    trainer.train()
    assert not any(PEAK in entry for entry in trainer.state.log_history)
    own = MemoryCallback(every=1, estimate=estimated(10**6))
    trainer = trainer_for(tmp_path, [own, ActCompressCallback()])
    trainer.train()
    assert [RATIO in entry for entry in losses(trainer.state.log_history)] == [False, True, True, True]


def test_devices_that_cannot_be_measured_are_left_alone():
    callback = ActCompressCallback()
    args = SimpleNamespace(device=torch.device("xpu"))
    state = SimpleNamespace(global_step=0, stateful_callbacks=None)
    callback.on_train_begin(args, state, None)
    callback.on_step_begin(args, state, None)
    callback.on_step_end(args, state, None)


@pytest.mark.parametrize(
    "options, said",
    [
        ({}, True),
        ({"disable_tqdm": False}, True),
        ({"log_level": "info"}, True),
        ({"log_level": "error"}, False),
    ],
)
def test_it_says_one_line_as_loud_as_the_trainer(tmp_path, capsys, options, said):
    trainer_for(tmp_path, [ActCompressCallback()], **options)
    assert capsys.readouterr().out == (LINE if said else "")


def test_other_processes_are_silent(tmp_path, capsys):
    trainer = trainer_for(tmp_path)
    args = trainer.args
    for main in (False, True):
        callback = ActCompressCallback("int8")
        callback.on_init_end(args, SimpleNamespace(is_world_process_zero=main), None, model=trainer.model)
        assert capsys.readouterr().out == ("hf_actcompress: patched 2 layers, int8, lossy\n" if main else "")


def test_each_model_of_model_init_is_said(tmp_path, capsys):
    built = trainer_for(tmp_path)
    trainer = Trainer(
        args=built.args,
        model_init=lambda: trainer_for(tmp_path).model,
        train_dataset=built.train_dataset,
        callbacks=[ActCompressCallback()],
    )
    trainer.train()
    assert capsys.readouterr().out.count(LINE) == 2
