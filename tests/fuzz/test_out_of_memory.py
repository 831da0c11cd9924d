"""A patched model goes on after memory ran out at any op of a step: a sample of the ops that changes every day."""

from __future__ import annotations

import time

import pytest
import torch

from tests.families import step
from tests.fuzz.out_of_memory import SUBJECTS, OutOfMemoryAt, Subject, count_ops, make_pair, try_all

EVERY = 97
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("few_objects")]


@pytest.mark.daily(3)
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_usable_after_running_out(subject: Subject) -> None:
    if subject.lora:
        pytest.importorskip("peft")
    day = int(time.time() // 86_400)
    tried, wrong = try_all(subject, EVERY, first=day)
    assert tried >= 3
    assert not wrong, f"day {day}: " + "\n".join(wrong)


def test_ops_of_forward_and_backward_are_counted() -> None:
    """The counter must see the ops of backward, or else memory would never run out there."""
    pair = make_pair(SUBJECTS[0])
    whole = count_ops(pair)
    with OutOfMemoryAt() as counter:
        loss = pair.ours(**pair.batch).loss
    with pytest.raises(torch.OutOfMemoryError, match=f"op {whole - 1}"), OutOfMemoryAt(whole - 1):
        step(pair.ours, pair.batch)
    assert 0 < counter.ops < whole and loss.requires_grad
