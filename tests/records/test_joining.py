"""Copies, casts, parts, paddings and rotations of what is kept anyway are not kept, with stock's bits."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_actcompress.codecs import IDENTITY
from hf_actcompress.ops import dropout, layer_norm
from hf_actcompress.private_apis import FakeTensorMode
from hf_actcompress.records import frame, netted
from hf_actcompress.records.joined import is_asked
from hf_actcompress.records.joining import JOINING_NODES, VIEWS, compute_of
from tests.records.test_net import assert_same, kept, net, stock

# images, rows, columns, channels
SHAPE = (2, 5, 7, 8)


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def windows(x: Tensor, size: int, fill: float = 0.0) -> Tensor:
    """[B, H, W, C] in windows of that size, as vision models partition their maps."""
    x = F.pad(x, (0, 0, 0, -x.size(2) % size, 0, -x.size(1) % size), value=fill)
    batch, height, width, channels = x.shape
    x = x.view(batch, height // size, size, width // size, size, channels)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, size, size, channels)


def angles(x: Tensor, count: int = 8) -> Tensor:
    return torch.linspace(-1, 1.5, count).to(x.dtype)


def rotated(x: Tensor) -> Tensor:
    """The first halves of each vector, rotated by a model's own code, and the second halves as they are."""
    turned, rest = x.split([4, x.size(-1) - 4], -1)
    half = torch.cat([-turned[..., 2:], turned[..., :2]], -1)
    return torch.cat([turned * angles(x, 4) + half * angles(x, 4).flip(0), rest], -1)


# of a tensor that is kept already
CHAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "windows": lambda x: windows(x, 3),
    "windows that fit": lambda x: windows(x[:, :4, :6], 2),
    "windows with another fill": lambda x: windows(x, 4, -3.5),
    "padding in front": lambda x: F.pad(x, (0, 0, 0, 0, 2, 0, 1, 0), value=7.0),
    "no padding": lambda x: F.pad(x, (0, 0)),
    "rotation": rotated,
    "rotation of heads": lambda x: rotated(x.transpose(1, 2)).transpose(1, 2),
    "first keys of a cache": lambda x: torch.cat([x.new_empty(0), x], 1),
    "repetition": lambda x: x.repeat(1, 2, 1, 1),
    "stack": lambda x: torch.stack([x, x], 2),
    "one image": lambda x: x[1].unsqueeze(0).expand(3, -1, -1, -1).reshape(-1, 8),
    "unbound images": lambda x: torch.cat(x.unbind(0)[::-1]),
    "chunks": lambda x: torch.cat(x.chunk(3, 1)[1:], 1),
    "from the end": lambda x: x[:, -3:].contiguous(),
    "every second": lambda x: x[:, ::2].contiguous(),
    "squeezed": lambda x: x[:, :1].squeeze(1).transpose(0, 1).repeat(3, 1, 1),
    "product with a number": lambda x: torch.cat([x * 0.3, x / 3], 1),
    "product with a constant": lambda x: torch.cat([x * angles(x), angles(x) * x], 1),
    "rounded": lambda x: x.to(torch.float16).to(x.dtype),
    "sum of wider ones": lambda x: (x.double() + x.double()).to(x.dtype),
    "quotient by a constant": lambda x: (x / angles(x)).transpose(1, 2).contiguous(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_not_kept(name: str, dtype: torch.dtype) -> None:
    a, weight = (x.detach().to(dtype).requires_grad_() for x in (leaf(*SHAPE), leaf(8, 6, seed=1)))

    def forward() -> Tensor:
        x = a + 1
        y = CHAINS[name](x)
        return (y @ weight).square().sum() + x.sin().sum()

    def sooner() -> Tensor:
        # what is kept has been saved before
        x = a + 1
        read = x.sin().sum()
        return (CHAINS[name](x) @ weight).square().sum() + read

    assert_same(sooner, (a, weight))
    assert_same(forward, (a, weight))
    with torch.no_grad():
        nbytes = CHAINS[name](a.detach()).nbytes
    # an element of a padding is kept
    assert kept(sooner, stock) - kept(sooner, net) >= nbytes - 8


@pytest.mark.parametrize("name", ["windows", "rotation", "first keys of a cache", "repetition", "chunks"])
def test_of_a_norms_output_that_is_gone(name: str) -> None:
    """Nothing but the norm's input is kept, although the norm's output has died before it could be saved."""
    a, weight, gain = leaf(*SHAPE), leaf(8, 6, seed=1), leaf(8, seed=2)

    def forward() -> Tensor:
        return (CHAINS[name](layer_norm(a + 1, (8,), gain, None, 1e-5)) @ weight).square().sum()

    assert_same(forward, (a, gain, weight))
    with torch.no_grad():
        nbytes = CHAINS[name](a.detach()).nbytes
    assert kept(forward, frame) - kept(forward, net) >= nbytes - 8


def test_of_the_norm_of_a_part() -> None:
    """The part is kept as a copy, which no record has. The norm's output has died before it could be saved."""
    a, weight, gain = leaf(2, 5, 7, 24), leaf(8, 6, seed=1), leaf(8, seed=2)
    products: list[Tensor] = []

    def forward() -> Tensor:
        y = windows(layer_norm((a + 1).split(8, -1)[1], (8,), gain, None, 1e-5), 3) @ weight
        products.append(y.detach())
        return y.square().sum()

    assert_same(forward, (a, gain, weight))
    statistics = 2 * a.nbytes // a.size(-1)
    # an element of the padding is kept
    assert kept(forward, net) == a.nbytes // 3 + statistics + products.pop().nbytes + 4


def test_casts_under_autocast() -> None:
    """Of the product's factors, which autocast has cast."""
    a, weight = leaf(40, 16), torch.nn.Parameter(leaf(24, 16, seed=1).detach())

    def forward() -> Tensor:
        x = a + 1
        read = x.sin().sum()
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, weight).float().square().sum() + read

    assert_same(forward, (a, weight))
    # the factors, and the wider copy of the product
    assert kept(forward, stock) - kept(forward, net) >= (40 * 16 + 24 * 16) * 2


def test_a_cast_is_made_from_its_own_source_alone() -> None:
    a, weight = leaf(*SHAPE), leaf(8, 6, seed=1)

    def rounded_before(x: Tensor) -> Tensor:
        # x has more bits than the tensor that is kept
        return x.bfloat16().sin().sum() + (x @ weight).square().sum()

    def written_on(x: Tensor) -> Tensor:
        y = x.bfloat16()
        with torch.no_grad():
            y.clamp_(max=0.5)
        return (y.float() @ weight).square().sum() + x.sin().sum()

    assert compute_of((a + 1).to("meta").grad_fn, 0) is None
    assert_same(lambda: written_on(a + 1), (a, weight))
    assert_same(lambda: rounded_before(a + 1), (a, weight))
    assert kept(lambda: rounded_before(a + 1), net) == kept(lambda: rounded_before(a + 1), stock)


def test_our_ops_ask_about_a_cast_if_they_would_ask_about_its_source() -> None:
    x = leaf(*SHAPE) + 1
    for y, asked in ((torch.cat([x, x]), True), (x + x, True), (x.sin(), True), (x.exp(), False)):
        assert is_asked(y) == is_asked(y.bfloat16()) == is_asked(y.transpose(1, 2).bfloat16()) == asked


def test_of_something_that_is_not_kept() -> None:
    a, weight = leaf(*SHAPE), leaf(8, 6, seed=1)
    for chain in CHAINS.values():

        def forward(chain: Callable[[Tensor], Tensor] = chain) -> Tensor:
            return (chain(a.exp().cumsum(0) + 1) @ weight).sum()

        assert_same(forward, (a, weight))
        assert kept(forward, net) <= kept(forward, stock)


def test_a_padding_that_takes_something_off() -> None:
    a, weight = leaf(*SHAPE), leaf(8, 6, seed=1)

    def forward() -> Tensor:
        x = a + 1
        read = x.sin().sum()
        return (F.pad(x, (0, 0, 1, -1)) @ weight).square().sum() + read

    assert_same(forward, (a, weight))
    assert kept(forward, net) <= kept(forward, stock)


def test_a_write_that_no_node_shows() -> None:
    """Each chain of a model is compared once, so a write under no_grad is seen."""
    a, weight, gain = leaf(*SHAPE), leaf(8, 6, seed=1), leaf(8, seed=2)

    def forward() -> Tensor:
        y = layer_norm(a + 1, (8,), gain, None, 1e-5)
        with torch.no_grad():
            y.clamp_(max=0.5)
        return (windows(y, 3) @ weight).square().sum()

    assert_same(forward, (a, gain, weight))


def test_a_write_in_a_later_forward() -> None:
    """A norm's output that is alive has a version, which says that it was written on."""
    a, weight, gain = leaf(*SHAPE), leaf(8, 6, seed=1), leaf(8, seed=2)
    proved: dict[Hashable, bool] = {}

    def gradients(context: AbstractContextManager[None], written: bool) -> tuple[Tensor, ...]:
        with context:
            y = layer_norm(a + 1, (8,), gain, None, 1e-5)
            if written:
                with torch.no_grad():
                    y.clamp_(max=0.5)
            loss = (windows(y, 3) @ weight).square().sum()
        return torch.autograd.grad(loss, (a, weight, gain))

    for written in (False, True):
        with frame():
            ours = gradients(netted(IDENTITY, proved), written)
        assert all(map(torch.equal, ours, gradients(frame(), written)))


def test_what_no_backward_keeps_is_held_no_longer() -> None:
    """A dropout's input could give its output again, but dies before the forward ends."""
    a = leaf(*SHAPE)
    with net():
        x = a + 1
        y = dropout(x, 0.5)
        of = weakref.ref(x)
        del x
        assert of() is not None
        del y
        assert of() is None


def test_a_norms_input_that_is_made_again_is_not_held() -> None:
    a, gain = leaf(*SHAPE), leaf(8, seed=2)
    with net():
        x = a + 1
        read = x.sin()
        joined = torch.cat([x, x], 1)
        y = layer_norm(joined, (8,), gain, None, 1e-5)
        of = weakref.ref(joined)
        del joined
        z = y.sum() + read.sum()
        del y
        assert of() is None
    z.backward()


def test_a_small_part_of_a_norms_output_is_kept() -> None:
    """To make the whole output again would take more memory at a time than the part."""
    a, weight, gain = leaf(8, 32, 8), leaf(8, 6, seed=1), leaf(8, seed=2)

    def forward(length: int) -> Tensor:
        return (layer_norm(a + 1, (8,), gain, None, 1e-5)[:, :length].contiguous() @ weight).square().sum()

    for length, saved in ((8, 0), (20, 8 * 20 * 8 * 4)):
        part = partial(forward, length)
        assert_same(part, (a, gain, weight))
        assert kept(part, frame) - kept(part, net) == saved


def test_chains_of_tensors_without_data() -> None:
    """An estimate runs on such tensors."""
    with FakeTensorMode():
        a, weight = torch.randn(SHAPE).requires_grad_(), torch.randn(8, 6).requires_grad_()
        for chain in CHAINS.values():
            with net():
                x = a + 1
                read = x.sin().sum()
                loss = (chain(x) @ weight).square().sum() + read
            loss.backward()


def test_every_node_of_the_tables_is_tried() -> None:
    seen = {"AddBackward0", "SubBackward0"}
    for chain in CHAINS.values():
        pending = [chain(leaf(*SHAPE) + 1).grad_fn]
        while pending:
            node = pending.pop()
            seen.add(type(node).__name__)
            pending += [before for before, _ in node.next_functions if before is not None]
    # the others of these are made by torch itself, by other paths to the same shapes
    rare = {"AliasBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward2"}
    assert {*JOINING_NODES, *VIEWS} - rare <= seen
