"""A short soak of three subjects, and a test that a leak is found."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.fuzz.soak import SUBJECTS, Subject, growth, make_step, soak

STEPS = 150
pytestmark = pytest.mark.usefixtures("few_objects")


@pytest.mark.daily(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("subject", SUBJECTS[:3], ids=lambda subject: subject.name)
def test_memory_is_constant(subject: Subject) -> None:
    if subject.lora:
        pytest.importorskip("peft")
    assert growth(soak(make_step(subject), STEPS, readings=4)) == []


def test_a_leak_is_seen() -> None:
    """The step leaks one small tensor."""
    left: list[Tensor] = []
    step = make_step(SUBJECTS[1])

    def leaking(index: int) -> None:
        step(index)
        left.append(torch.zeros(4))

    assert [line.split(":")[0] for line in growth(soak(leaking, 40, readings=3))][:2] == ["tensors", "bytes of tensors"]
