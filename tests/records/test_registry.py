"""Which tensors have a record: they are found by their data, as long as the data have not changed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_actcompress.records import (
    Derived,
    Pending,
    Stored,
    declare,
    live_entries,
    record_of,
    shared_copy,
    shared_derivation,
    stored_exact,
)
from tests.records.toys import Half, consume, declared, is_derived, value_of


def test_declared_tensor_is_derived_and_others_are_stored():
    y = declared(torch.randn(3, 4))
    assert is_derived(y)
    other = torch.randn(3, 4)
    record = record_of(other)
    assert isinstance(record, Stored) and record.tensors[0] is other


def test_same_record_for_every_consumer():
    y = declared(torch.randn(3, 4))
    first, second = record_of(y), record_of(y)
    assert isinstance(first, Derived) and isinstance(second, Derived)
    assert first.recipe is second.recipe


def test_entry_ends_with_the_tensor():
    y = declared(torch.randn(3, 4))
    assert live_entries() == 1
    del y
    assert live_entries() == 0


def test_recycled_address_is_not_found():
    """Free and allocate until an address is used again: the new tensor at this address must have no record."""
    x = torch.randn(64)
    addresses = set()
    recycled = 0
    for _ in range(200):
        y = declared(x)
        addresses.add(y.untyped_storage()._cdata)
        del y
        z = torch.cos(x)
        recycled += z.untyped_storage()._cdata in addresses
        assert not is_derived(z)
        del z
    assert recycled > 0, "the allocator never gave an address back; this test tested nothing"


@pytest.mark.parametrize("swap", [lambda y: y.set_(torch.zeros(64)), lambda y: setattr(y, "data", torch.zeros(64))])
def test_data_swapped_under_a_live_tensor_is_not_found(swap):
    """`set_` and `.data =` give a living tensor another storage. The old one may then belong to any tensor."""
    y = declared(torch.randn(64))
    anyone = y.data  # the old storage, with a version counter of its own
    assert is_derived(anyone)
    swap(y)
    assert not is_derived(anyone) and not is_derived(y)


VIEWS = {
    "itself": lambda y: y,
    "reshaped": lambda y: y.view(2, 12),
    "flat": lambda y: y.view(-1),
    "unsqueezed": lambda y: y.unsqueeze(1),
    "transposed": lambda y: y.t(),
    "permuted": lambda y: y.view(2, 2, 6).permute(2, 0, 1),
    "detached": lambda y: y.detach(),
    "expanded": lambda y: y[:1].expand(4, 6),
    "strided": lambda y: y.view(-1).as_strided((4, 6), (1, 4)),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_view_of_the_same_data_is_the_same_record(view):
    y = declared(torch.randn(4, 6))
    v = view(y).detach().requires_grad_()
    assert is_derived(v) == (v.numel() == y.numel())
    z = consume(v)
    dz = torch.randn_like(z)
    (dv,) = torch.autograd.grad(z, v, dz)
    assert torch.equal(dv, 2 * v.detach() * dz)


NOT_THE_SAME = {
    "half": lambda y: y[:2],
    "other offset": lambda y: y[2:],
    "every second": lambda y: y.view(-1)[::2],
    "other dtype": lambda y: y.view(torch.int32),
    "one expanded": lambda y: y[0].expand(3, 6),
}


@pytest.mark.parametrize("view", NOT_THE_SAME.values(), ids=NOT_THE_SAME.keys())
def test_other_data_in_the_same_storage_is_not_the_same_record(view):
    y = declared(torch.randn(4, 6))
    assert not is_derived(view(y))


def test_view_that_reaches_beyond_the_declared_slice():
    """Same storage, offset, count, dtype and version, yet other elements: it must be kept by itself."""
    buffer = torch.randn(8, 4)
    y = buffer[:4]
    declare(y, torch.sin, stored_exact(torch.randn(4, 4)))
    assert is_derived(y)
    assert not is_derived(buffer[::2])


def test_non_contiguous_outputs_are_not_declared():
    y = torch.randn(4, 6).t()
    declare(y, torch.sin, stored_exact(torch.randn(6, 4)))
    assert live_entries() == 0


def test_heads_of_contiguous_tokens_are_declared():
    """Norms of queries and keys have such outputs, whose heads stand before the tokens."""
    x = torch.randn(2, 5, 3, 4).transpose(1, 2)
    y = x.sin()
    declare(y, torch.sin, stored_exact(x))
    for view in (y, y.transpose(1, 2), y.transpose(1, 2).flatten(2)):
        assert is_derived(view) and torch.equal(value_of(record_of(view)), view)


def test_conjugated_complex_data_have_no_record():
    y = torch.randn(4, dtype=torch.complex64)
    declare(y, torch.sin, stored_exact(y.clone()))
    assert not is_derived(y) and not is_derived(y.conj())


def test_zero_size_tensors_have_no_entry():
    y = torch.empty(0, 4)
    declare(y, torch.sin, stored_exact(torch.empty(0, 4)))
    assert live_entries() == 0 and not is_derived(y) and isinstance(record_of(y), Stored)


def test_inference_tensors_have_no_entry():
    with torch.inference_mode():
        y = declared(torch.randn(4))
        assert live_entries() == 0
        assert isinstance(record_of(y), Stored)


def test_in_place_write_makes_a_new_tensor():
    y = declared(torch.randn(4, 6))
    y.mul_(2)
    assert not is_derived(y)


def test_in_place_write_through_a_view_makes_a_new_tensor():
    y = declared(torch.randn(4, 6))
    y.view(-1)[3:5].zero_()
    assert not is_derived(y)


def test_written_source_makes_the_output_stored():
    """A source that changed cannot rebuild the output any more."""
    x = torch.randn(4, 6)
    y = declared(x)
    x.add_(1)
    record = record_of(y)
    assert isinstance(record, Stored) and record.tensors[0] is y


def test_written_source_of_a_source():
    x = torch.randn(4, 6)
    y = declared(x)
    z = torch.cos(y)
    declare(z, torch.cos, record_of(y))
    assert is_derived(z)
    x.add_(1)
    assert not is_derived(z)
    assert not is_derived(y)


def test_gradient_is_right_when_the_source_is_written_before_the_consumer():
    x = torch.randn(4, 6)
    w = torch.ones(4, 6, requires_grad=True)
    h = w * 1.0
    y = torch.sin(x)
    declare(y, torch.sin, stored_exact(x))
    x.add_(1)
    z = consume(h * y)
    (dw,) = torch.autograd.grad(z.sum(), w)
    torch.testing.assert_close(dw, 2 * y * y)


def test_source_written_after_the_consumer_raises_in_backward():
    x = torch.randn(4, 6)
    base = torch.randn(4, 6, requires_grad=True)
    y = base * 1.0
    declare(y, torch.sin, stored_exact(x))
    z = consume(y)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_codec_packs_once_for_all_consumers():
    codec = Half()
    x = torch.randn(4, 6)
    first, second = record_of(x, codec), record_of(x, codec)
    assert first is second
    view = record_of(x.view(-1), codec)
    assert isinstance(view, Derived) and view.sources == (first,)
    assert codec.log == []
    assert torch.equal(value_of(first).view(-1), value_of(view))
    assert codec.log.count("pack") == 1


def test_codec_packs_again_after_a_write():
    codec = Half()
    x = torch.randn(4, 6)
    value_of(record_of(x, codec))
    x.add_(1)
    assert torch.equal(value_of(record_of(x, codec)), x.bfloat16().float())
    assert codec.log.count("pack") == 2


def test_declared_tensor_is_never_packed():
    codec = Half()
    y = declared(torch.randn(4, 6))
    assert isinstance(record_of(y, codec), Derived) and codec.log == []


def test_packing_holds_neither_the_tensor_nor_its_graph():
    codec = Half()
    x = torch.randn(4, 6, requires_grad=True)
    h = x * 2
    record = record_of(h, codec)
    packed = record.packed() if isinstance(record, Pending) else record
    assert isinstance(packed, Stored) and not packed.tensors[0].requires_grad
    del h
    assert live_entries() == 0


def test_transposed_tensor_through_a_codec_and_then_its_base():
    codec = Half()
    base = torch.randn(4, 6)
    for x in (base.t(), base, base.t()):
        record = record_of(x, codec)
        (value,) = [value_of(record)]
        assert torch.equal(value, x.bfloat16().float())


def test_shared_derivation_is_one_recipe_by_name_and_view():
    y = declared(torch.randn(4, 6))
    one = shared_derivation(y, "cast", Tensor.double)
    assert shared_derivation(y, "cast", Tensor.double).recipe is one.recipe
    assert shared_derivation(y, "other", Tensor.double).recipe is not one.recipe
    assert shared_derivation(y.view(-1), "cast", Tensor.double).recipe is not one.recipe


def test_derivations_from_the_tensor_and_from_its_encoding_are_not_mixed():
    x = torch.randn(4, 6)
    exact = shared_derivation(x, "cast", Tensor.double)
    lossy = shared_derivation(x, "cast", Tensor.double, Half())
    assert exact.recipe is not lossy.recipe
    assert torch.equal(value_of(exact), x.double())


def test_shared_copy_is_made_once_and_again_after_a_write():
    x = torch.randn(4, 6)
    calls = []

    def make() -> Tensor:
        calls.append(1)
        return x.bfloat16()

    assert shared_copy(x, "bf16", make) is shared_copy(x, "bf16", make)
    x.add_(1)
    assert torch.equal(shared_copy(x, "bf16", make).tensors[0], x.bfloat16())
    assert len(calls) == 2


def test_a_parameter_is_no_activation():
    """It goes through no codec and gets no entry, because an entry lives as long as its tensor: here, forever."""
    codec = Half()
    weight = torch.nn.Parameter(torch.randn(4, 6))
    for x in (weight, weight[:2], weight.unsqueeze(0)):
        record = record_of(x, codec)
        assert isinstance(record, Stored) and record.tensors[0] is x
    assert live_entries() == 0 and codec.log == []
