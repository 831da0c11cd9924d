"""The order in which offloaded activations come back. The device is a CPU, with a substitute for the CUDA stream."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from hf_actcompress import patch_model
from hf_actcompress.codecs import Codec, IntGroup, Offload, offload
from hf_actcompress.codecs.prefetch import WINDOW, Lane, Tensors, Ticket
from hf_actcompress.ops import linear
from hf_actcompress.records import clear
from tests.families import BY_NAME, differing, step

LAYERS = 8


class Stream:
    """A link that records what happens, and whose copies become complete only when somebody waits for them.

    Attributes:
        events: ("start" or "finish", number of the copy), in order.
        under_way: Copies that were begun and not yet waited for; `most` is the largest number of them at a time.
    """

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.copies: list[weakref.ref[Tensor]] = []
        self.under_way: set[int] = set()
        self.most = self.started = 0

    def start(self, tensors: Tensors) -> tuple[int, Tensors, Tensors]:
        number = self.started
        self.started += 1
        self.events.append(("start", number))
        # the values are copied in `finish`
        copies = tuple(torch.full_like(x, 77) for x in tensors)
        self.copies += map(weakref.ref, copies)
        self.under_way.add(number)
        self.most = max(self.most, len(self.under_way))
        return number, tensors, copies

    def finish(self, arrival: tuple[int, Tensors, Tensors]) -> Tensors:
        number, tensors, copies = arrival
        self.events.append(("finish", number))
        self.under_way.discard(number)
        for x, copy in zip(tensors, copies, strict=True):
            copy.copy_(x)
        return copies

    def alive(self) -> int:
        return sum(reference() is not None for reference in self.copies)


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture(autouse=True)
def lane(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lane]:
    lane = Lane(stream)
    monkeypatch.setattr(offload, "lane_of", lambda device: lane)
    yield lane
    # after every test, no copy is ahead and no copy is alive
    assert not lane._ahead and not lane._latest
    gc.collect()
    assert stream.alive() == 0


def leaves() -> list[Tensor]:
    """x [6, 8] and a weight [8, 8] for each layer."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 8)] + [(8, 8)] * LAYERS
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def chain(x: Tensor, *weights: Tensor, codec: Codec = Offload()) -> Tensor:  # noqa: B008
    for weight in weights:
        x = linear(x, weight, codec=codec).sin()
    return x


def stock(*inputs: Tensor) -> list[Tensor]:
    x, *weights = inputs
    for weight in weights:
        x = nn.functional.linear(x, weight).sin()
    return list(torch.autograd.grad(x.sum(), inputs))


def assert_same(found: tuple[Tensor, ...], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("codec", [Offload(), Offload(IntGroup(8, outliers=2))], ids=str)
def test_a_few_ahead_and_each_copied_once(stream: Stream, codec: Offload) -> None:
    inputs = leaves()
    found = torch.autograd.grad(chain(*inputs, codec=codec).sum(), inputs)
    clear()
    # backward asks for the last activation, and the copies of the next ones begin before it waits; after each wait, one
    # more copy begins
    expected = [("start", number) for number in range(WINDOW + 1)]
    for number in range(LAYERS):
        expected.append(("finish", number))
        expected += [("start", number + WINDOW + 1)] if number + WINDOW + 1 < LAYERS else []
    assert stream.events == expected
    assert stream.most == WINDOW + 1 and not stream.under_way
    assert_same(found, list(torch.autograd.grad(chain(*inputs, codec=codec.inner).sum(), inputs)))


def test_what_is_never_asked_for_is_dropped_when_backward_ends(stream: Stream) -> None:
    inputs = leaves()
    y = chain(*inputs)
    (dlast,) = torch.autograd.grad(y.sum(), inputs[-1:], retain_graph=True)
    # the last layer's input is used; the copies of those before it were begun for nothing
    assert stream.events == [*(("start", number) for number in range(WINDOW + 1)), ("finish", 0)]
    gc.collect()
    assert stream.alive() == 0
    assert torch.equal(dlast, stock(*inputs)[-1])
    # and the next backward copies it again
    assert_same(torch.autograd.grad(y.sum(), inputs), stock(*inputs))
    assert stream.started == WINDOW + 1 + LAYERS


def test_several_backwards_through_one_graph(stream: Stream) -> None:
    inputs = leaves()
    y = chain(*inputs)
    for backward in range(1, 4):
        assert_same(torch.autograd.grad(y.sum(), inputs, retain_graph=backward < 3), stock(*inputs))
        assert stream.started == backward * LAYERS


def test_a_backward_that_raises(stream: Stream) -> None:
    inputs = leaves()

    def refuse(dx: Tensor) -> Tensor:
        raise ValueError("refused")

    x = chain(*inputs[:3])
    x.register_hook(refuse)
    y = chain(x, *inputs[3:])
    with pytest.raises(ValueError, match="refused"):
        torch.autograd.grad(y.sum(), inputs)
    del x, y
    assert_same(torch.autograd.grad(chain(*inputs).sum(), inputs), stock(*inputs))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(stream: Stream, reentrant: bool) -> None:
    """What the first pass packed is freed. What the second pass packs comes back in the order of that pass."""
    inputs = leaves()
    x, *weights = inputs
    for first in range(0, LAYERS, 2):
        x = checkpoint(chain, x, *weights[first : first + 2], use_reentrant=reentrant)
    x.sum().backward()
    assert_same(tuple(p.grad for p in inputs if p.grad is not None), stock(*inputs))


def test_two_graphs_at_once(stream: Stream) -> None:
    """Gradient accumulation over several losses has several graphs. Their activations must not be exchanged."""
    a, b = leaves(), [(2 * x).detach().requires_grad_() for x in leaves()]
    first, second = chain(*a), chain(*b)
    assert_same(torch.autograd.grad(first.sum(), a), stock(*a))
    assert_same(torch.autograd.grad(second.sum(), b), stock(*b))


def test_other_hooks_put_other_tensors_in_their_place(stream: Stream) -> None:
    inputs = leaves()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
        y = chain(*inputs)
    assert_same(torch.autograd.grad(y.sum(), inputs), stock(*inputs))
    with save_on_cpu():
        y = chain(*inputs)
    assert_same(torch.autograd.grad(y.sum(), inputs), stock(*inputs))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_model(stream: Stream, lane: Lane, monkeypatch: pytest.MonkeyPatch, name: str, checkpointing: bool) -> None:
    asked: dict[Ticket, list[bool]] = {}
    back = lane.back

    def watched(ticket: Ticket, tensors: Tensors) -> Tensors:
        asked.setdefault(ticket, []).append(ticket.arrival is not None)
        return back(ticket, tensors)

    monkeypatch.setattr(lane, "back", watched)
    family = BY_NAME[name]
    exact, ours = (patch_model(family.build(torch.bfloat16), preset) for preset in ("exact", "offload"))
    for model in (exact, ours):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = family.make_batch("right")
    (loss, expected), (ours_loss, found) = step(exact, batch), step(ours, batch)
    assert torch.equal(ours_loss, loss) and not differing(found, expected)
    assert stream.most <= WINDOW + 1
    if not checkpointing:  # a checkpoint packs again in backward, and these copies cannot be begun ahead
        # when backward asked for an activation, its copy was under way, except for the first one; none was copied twice
        assert len(asked) > 10 and [early[0] for early in asked.values()] == [False] + [True] * (len(asked) - 1)
        assert stream.started == len(asked) < sum(map(len, asked.values()))
