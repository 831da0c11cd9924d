"""Sampling by the norm of x times that of an earlier gradient: unbiased as without, and nearer where that is known."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.codecs import CODECS, RowSample
from hf_actcompress.codecs.gradient_norms import SiteNorms, samples_are
from hf_actcompress.errors import NotPatchedError
from hf_actcompress.ops import linear
from hf_actcompress.records import clear, frame
from hf_actcompress.reference import seed_codecs
from hf_actcompress.training import GradientNorms
from tests.families import BY_NAME, Gradients, relative_error, step

B, T, D, OUT = 3, 20, 12, 48
SAMPLES = torch.tensor([4, 0, 2])


def activations() -> tuple[Tensor, Tensor]:
    """x [B, T, D], and a dy [B, T, OUT] that has nothing to do with it and whose norms go over two decades."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, T, D, generator=generator, dtype=torch.float64)
    dy = torch.randn(B, T, OUT, generator=generator, dtype=torch.float64)
    return x, dy * 10 ** (2 * torch.rand(B, T, 1, generator=generator, dtype=torch.float64) - 1)


def exact(x: Tensor, dy: Tensor) -> Tensor:
    return dy.flatten(0, 1).t() @ x.flatten(0, 1)


def draws(codec: RowSample, x: Tensor, dy: Tensor, count: int) -> Tensor:
    """dW [count, OUT, D]; the cache, if there is one, is not taught by them."""
    out = []
    with samples_are(SAMPLES):
        for _ in range(count):
            tensors, meta = codec.pack(x)
            dweight = RowSample(codec.fraction).grad_weight(dy, tensors[:2], meta)
            assert dweight is not None
            out.append(dweight)
    return torch.stack(out)


def caches() -> dict[str, SiteNorms | None]:
    _, dy = activations()
    informed, mistaken, partly = (SiteNorms(6, T) for _ in range(3))
    informed.note(dy.flatten(0, 1), SAMPLES)
    # what was large was small then, and the other way round; some were zero, as padding is
    wrong = dy / dy.norm(dim=-1, keepdim=True) ** 2
    wrong[:, ::3] = 0
    mistaken.note(wrong.flatten(0, 1), SAMPLES)
    partly.note(dy[:1].flatten(0, 1), SAMPLES[:1])
    return {"none": None, "new": SiteNorms(6, T), "informed": informed, "mistaken": mistaken, "partly": partly}


@pytest.mark.parametrize("name", caches())
def test_unbiased_whatever_the_cache_holds(name: str) -> None:
    x, dy = activations()
    errors = draws(RowSample(0.3, norms=caches()[name]), x, dy, 2048) - exact(x, dy)
    # five standard errors for each of 576 entries
    assert bool((errors.mean(0).abs() <= 5 * errors.std(0) / math.sqrt(2048)).all())
    # 1 / sqrt(n): 64 times the draws, an eighth of the error. the mean of the squares of 32 means, each of at least 12
    # dimensions, has a relative deviation of at most sqrt(2 / 32 / 12), its root half of it: five of them
    few, many = errors.square().mean().sqrt(), errors.view(32, 64, OUT, D).mean(1).square().mean().sqrt()
    assert float(few / many) == pytest.approx(8, rel=5 * math.sqrt(2 / 32 / 12) / 2)


def test_knowing_the_gradient_lowers_the_variance() -> None:
    x, dy = activations()
    error = {
        name: float((draws(RowSample(0.3, norms=norms), x, dy, 400) - exact(x, dy)).square().mean())
        for name, norms in caches().items()
    }
    assert error["informed"] < error["partly"] < error["none"]
    assert error["informed"] < 0.5 * error["none"] < error["mistaken"]


def test_what_is_noted_are_the_norms_of_all_consumers_of_the_last_backward() -> None:
    x, dy = activations()
    weights = [torch.randn(OUT, D, dtype=torch.float64).requires_grad_() for _ in range(3)]
    norms = [SiteNorms(6, T + 5) for _ in weights]
    gradients = [dy, 2 * dy, dy.flip(1)]
    for scale in (1, 10):
        with frame(), samples_are(SAMPLES):
            ys = [linear(x, w, codec=RowSample(0.3, norms=n)) for w, n in zip(weights, norms, strict=True)]
        torch.autograd.backward(ys, [scale * g for g in gradients])
    # one tensor has one sample: that of its first consumer
    expected = sum((10 * g).square().sum(-1) for g in gradients)
    assert isinstance(expected, Tensor)
    torch.testing.assert_close(norms[0].squares[SAMPLES, :T], expected.float())
    assert norms[0].seen.tolist() == [True, False, True, False, True, False]
    assert not norms[0].squares[SAMPLES, T:].any() and not norms[1].squares.any() and not norms[2].squares.any()


def test_nothing_is_learnt_from_an_overflow() -> None:
    norms = SiteNorms(2, 3)
    norms.note(torch.tensor([[1.0, math.inf], [3.0, 4.0], [math.nan, 0.0]]), torch.tensor([1]))
    assert norms.squares[1].tolist() == [0, 25, 0]


def test_batches_of_another_shape_are_sampled_without() -> None:
    """A classifier's input [B, D] is one position; what is longer than the cache or in other rows is left to |x|."""
    x, _ = activations()
    codec = RowSample(0.3, norms=SiteNorms(6, T))
    with samples_are(SAMPLES):
        assert len(codec.pack(x[:, 0])[0]) == len(codec.pack(x)[0]) == 3
        assert len(codec.pack(torch.cat([x, x], 1))[0]) == len(codec.pack(x.flatten(0, 1)[:-1])[0]) == 2
    assert len(codec.pack(x)[0]) == 2
    # not part of the format
    assert codec == RowSample(0.3) == CODECS["wtacrs30"] and hash(codec) == hash(RowSample(0.3))


def mean_error(model: Any, batch: dict[str, Tensor], truth: Gradients, norms: GradientNorms | None) -> float:
    errors = []
    for seed in range(12):
        clear()
        seed_codecs(seed)
        if norms is None:
            found = step(model, batch)[1]
        else:
            with norms.of(torch.arange(3)):
                found = step(model, batch)[1]
        errors.append(relative_error(found, truth) ** 2)
    return sum(errors) / len(errors)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_whose_loss_looks_at_one_token(checkpointing: bool) -> None:
    """In the second epoch the sample goes where the gradient was."""
    family = BY_NAME["bert"]
    batch = family.make_batch("right")
    batch["labels"] = torch.full_like(batch["labels"], -100)
    batch["labels"][:, 2] = 5
    model = family.build()
    truth = {n: g.double() for n, g in step(copy.deepcopy(model), batch)[1].items()}
    config = CompressionConfig(linear="wtacrs10", derive_linear=False, loss_head=False)
    patch_model(model, config)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    without = mean_error(model, batch, truth, None)
    norms = GradientNorms(model, samples=3, positions=13)
    assert len(norms.sites) == len([m for m in model.modules() if isinstance(m, torch.nn.Linear)])
    mean_error(model, batch, truth, norms)
    assert mean_error(model, batch, truth, norms) < 0.7 * without


def test_it_says_what_is_missing() -> None:
    with pytest.raises(NotPatchedError, match="sampled"):
        GradientNorms(patch_model(BY_NAME["bert"].build()), 3, 13)
