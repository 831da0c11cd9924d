"""After a trial a training is as it was before: weights, optimizer states, modes, generators and memory."""

from __future__ import annotations

import gc
import random
import weakref

import numpy
import pytest
import torch

from hf_actcompress.memory import find_batch_size
from hf_actcompress.memory.measurement.training_restored import training_restored
from tests.memory.small_training import make_batch, training


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
