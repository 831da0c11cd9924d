"""A sum of embeddings is not kept: backward takes the rows again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from hf_actcompress import patch_model
from tests.families import BODY, BY_NAME, differing, step
from tests.oracle import kept_bytes

IDS = torch.tensor([[3, 0, 4, 1, 5], [5, 9, 2, 0, 6]])
PLACES = torch.arange(5)[None]
ROWS, WIDTH = IDS.numel(), 16
WRITTEN = "modified by an inplace operation"


class _Model(nn.Module):
    """What `embed` makes, a norm, and a sum whose backward keeps nothing."""

    def __init__(self, embed: Callable[[Any], Tensor], **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(11, WIDTH, 0, **options), nn.Embedding(5, WIDTH)
        self.kinds, self.norm, self.embed = nn.Embedding(2, WIDTH), nn.LayerNorm(WIDTH), embed

    def forward(self) -> Tensor:
        y: Tensor = self.norm(self.embed(self))
        return y.sum(-1)


def _written(m: Any) -> Tensor:
    x: Tensor = m.tokens(IDS)
    with torch.no_grad():
        m.tokens.weight.mul_(2)
    return x


def _summand_written(m: Any) -> Tensor:
    x = m.tokens(IDS)
    with torch.no_grad():
        x[:, 0] = 0
    return x + m.places(PLACES)  # type: ignore[no-any-return]


SUMS: dict[str, Callable[[Any], Tensor]] = {
    "tokens": lambda m: m.tokens(IDS),
    "two": lambda m: m.tokens(IDS) + m.places(PLACES),
    "three": lambda m: m.tokens(IDS) + m.kinds(IDS % 2) + m.places(PLACES),
    "other order": lambda m: m.places(PLACES) + (m.kinds(IDS % 2) + m.tokens(IDS)),
    "the same weight twice": lambda m: m.tokens(IDS) + m.tokens(IDS // 2),
    "int32": lambda m: m.tokens(IDS.int()),
    "scaled": lambda m: m.tokens(IDS) * 16**0.5 + m.places(PLACES),
    "scaled by a tensor": lambda m: (m.tokens(IDS) + m.places(PLACES)) * torch.tensor(3.0, dtype=m.tokens.weight.dtype),
}
OTHERS: dict[str, Callable[[Any], Tensor]] = {
    "in place": lambda m: m.tokens(IDS).add_(1),
    "alpha": lambda m: torch.add(m.tokens(IDS), m.places(PLACES), alpha=2),
    "constant": lambda m: m.tokens(IDS) + torch.ones(16),
    "product": lambda m: m.tokens(IDS) + m.tokens(IDS) @ torch.ones(16, 16),
    "scaled by a vector": lambda m: m.tokens(IDS) * torch.arange(16),
    "made weight": lambda m: nn.functional.embedding(IDS, m.tokens.weight * 2),
    "detached summand": lambda m: m.tokens(IDS) + m.places(PLACES).detach(),
    "weight written in the forward": _written,
    "summand written without a gradient": _summand_written,
}


def _kept(model: nn.Module) -> int:
    """The bytes of rows [.., WIDTH] in fp32 that a forward keeps: without the norm's two statistics for each row."""
    whole = kept_bytes(model) - 2 * 4 * ROWS
    return whole // (4 * ROWS * WIDTH)


def _gradients(model: nn.Module) -> list[Tensor]:
    y = model()
    weights = list(model.parameters())
    found = [
        torch.autograd.grad(y.sin().sum(), weights, retain_graph=True, allow_unused=True, materialize_grads=True)
        for _ in range(2)
    ]
    return [y.detach(), *found[0], *found[1]]


def _same_as_stock(model: nn.Module) -> bool:
    ours = patch_model(copy.deepcopy(model))
    return all(torch.equal(a, b) for a, b in zip(_gradients(model), _gradients(ours), strict=True))


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_made_again(name: str) -> None:
    assert _kept(_Model(SUMS[name])) >= 1
    assert _kept(patch_model(_Model(SUMS[name]))) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SUMS)
def test_gradients_are_stocks(name: str, dtype: torch.dtype) -> None:
    assert _same_as_stock(_Model(SUMS[name]).to(dtype))


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_such_sum_is_kept(name: str) -> None:
    assert _kept(patch_model(_Model(OTHERS[name]))) == _kept(_Model(OTHERS[name]))
    assert _same_as_stock(_Model(OTHERS[name]))


def test_a_weight_that_each_forward_scales_down() -> None:
    """`max_norm` writes into the weight before each lookup, which stock allows between forward and backward."""
    model = _Model(lambda m: m.tokens(IDS) + m.tokens(IDS.flip(1)), max_norm=0.5)
    assert _kept(patch_model(copy.deepcopy(model))) == 1
    assert _same_as_stock(model)


def test_rows_that_were_taken_outside_of_the_forward_are_kept() -> None:
    model = patch_model(_Model(lambda m: m.taken))
    model.taken = model.tokens(IDS)
    with torch.no_grad():
        model.tokens.weight.mul_(2)
    y = model()
    stock = nn.functional.layer_norm(model.taken, (WIDTH,), model.norm.weight, model.norm.bias)
    wanted = [torch.autograd.grad(z.sin().sum(), model.norm.weight)[0] for z in (y, stock.sum(-1))]
    assert torch.equal(*wanted)


def test_a_weight_that_is_written_before_backward_is_an_error() -> None:
    """Stock keeps the sum and would not mind; nobody gets wrong gradients."""
    model = patch_model(_Model(SUMS["two"]))
    y = model()
    with torch.no_grad():
        model.places.weight.mul_(2)
    with pytest.raises(RuntimeError, match=WRITTEN):
        y.sum().backward()


def test_indices_that_are_written_are_stocks_error() -> None:
    ids = IDS.clone()

    def embed(m: Any) -> Tensor:
        x: Tensor = m.tokens(ids)
        ids.zero_()
        return x

    y = patch_model(_Model(embed))()
    with pytest.raises(RuntimeError, match=WRITTEN):
        y.sum().backward()


def test_an_optimizer_that_steps_in_backward() -> None:
    """A weight's own gradient is the last thing that is made of it, so a step in its hook comes late enough."""

    def adjust(p: Tensor) -> None:
        with torch.no_grad():
            p.sub_(p.grad)

    stock = _Model(SUMS["three"])
    ours = patch_model(copy.deepcopy(stock))
    for model in (stock, ours):
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(adjust)
        for _ in range(2):
            model().sin().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(stock.parameters(), ours.parameters(), strict=True))


def test_what_hooks_of_others_get_is_not_a_whole_vocabulary() -> None:
    """`save_on_cpu` copies what it gets."""
    sizes: list[int] = []
    model = patch_model(_Model(SUMS["tokens"]))
    model.tokens = nn.Embedding(1000, WIDTH)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        model()
    assert max(sizes) <= ROWS * WIDTH
    with save_on_cpu():
        y = model()
    y.sum().backward()


def test_weights_whose_memory_is_freed_are_not_read() -> None:
    """FSDP marks the modules whose parameters it frees between forward and backward."""
    model = patch_model(_Model(SUMS["tokens"]))
    model.tokens._is_fsdp_managed_module = True
    assert _kept(model) == 1


def test_what_a_hook_may_write_into_is_kept() -> None:
    model = patch_model(_Model(SUMS["tokens"]))
    assert _kept(model) == 0
    model.tokens.register_forward_hook(lambda *_: None)
    assert _kept(model) == 1


def test_a_checkpointed_region_keeps_what_it_did() -> None:
    model = patch_model(_Model(SUMS["three"]))
    stock = _Model(SUMS["three"])
    found = []
    for each in (stock, model):
        embed = each.embed
        each.embed = lambda m, embed=embed: checkpoint(lambda: m.norm(embed(m)), use_reentrant=False)
        found.append(_gradients(each))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("name", "dtype"), [("bert", torch.float32), ("llama", torch.bfloat16), ("roberta", torch.float32)]
)
def test_layers_as_programs_and_leaf_by_leaf(name: str, dtype: torch.dtype) -> None:
    family = BY_NAME[name]
    batch, (stock, *ours) = family.make_batch(), [family.build(dtype).train() for _ in range(3)]
    loss, grads = step(stock, batch)
    kept = []
    for model, programs in zip(ours, (False, True), strict=True):
        patch_model(model, replace(BODY, programs=programs))
        found, mine = step(model, batch)
        assert torch.equal(loss, found)
        assert not differing(mine, grads)
        kept.append(kept_bytes(lambda model=model: model(**batch).loss))
    assert kept[0] == kept[1]
