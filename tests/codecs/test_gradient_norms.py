"""Rows are sampled by the norm of x times the norm of an earlier gradient, if that is known.

The weight gradient stays unbiased, and its variance falls.
"""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.codecs.table import CODECS
from hf_actcompress.errors import NotPatchedError, UnknownOptionError
from hf_actcompress.methods.row_sample.codec import RowSample, SampledMeta
from hf_actcompress.methods.row_sample.codec_gradient_norms import RememberedNorms, SiteNorms, samples_are
from hf_actcompress.models.arguments import arguments
from hf_actcompress.models.samples import samples_of_call
from hf_actcompress.modules.base import settings_of
from hf_actcompress.ops import linear
from hf_actcompress.records import clear, frame
from hf_actcompress.reference import seed_codecs
from hf_actcompress.training import ActCompressCallback, GradientNorms
from tests.families import BY_NAME, Gradients, relative_error, step

B, T, D, OUT = 3, 20, 12, 48
SAMPLES = torch.tensor([4, 0, 2])


def activations() -> tuple[Tensor, Tensor]:
    """x [B, T, D], and an independent dy [B, T, OUT] whose norms span two decades."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, T, D, generator=generator, dtype=torch.float64)
    dy = torch.randn(B, T, OUT, generator=generator, dtype=torch.float64)
    return x, dy * 10 ** (2 * torch.rand(B, T, 1, generator=generator, dtype=torch.float64) - 1)


def exact(x: Tensor, dy: Tensor) -> Tensor:
    return dy.flatten(0, 1).t() @ x.flatten(0, 1)


def draws(codec: RowSample, x: Tensor, dy: Tensor, count: int) -> Tensor:
    """dW [count, OUT, D]. A codec without norms computes them, so that they do not change the norms of `codec`."""
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
    # this cache holds small norms for large gradients and large norms for small ones; some are zero, as for padding
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
    # the error falls as 1 / sqrt(n): with 64 times as many draws it is an eighth. The mean square of 32 means, each of
    # at least 12 dimensions, has a relative deviation of at most sqrt(2 / 32 / 12), and its root has half of that. The
    # tolerance is five such deviations
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
    # x is sampled once, for its first consumer, so the norms of all consumers are added up in that one's cache
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
    """Rows are sampled by the norm of x alone if sequences are longer than the cache, or if rows are not whole samples.

    An input [B, D], such as a classifier's, has one position per sample.
    """
    x, _ = activations()
    codec = RowSample(0.3, norms=SiteNorms(6, T))
    with samples_are(SAMPLES):
        for known in (x[:, 0], x):
            meta = codec.pack(known)[1]
            assert isinstance(meta, SampledMeta) and meta.samples == (4, 0, 2)
        for unknown in (torch.cat([x, x], 1), x.flatten(0, 1)[:-1]):
            assert not isinstance(codec.pack(unknown)[1], SampledMeta)
    assert not isinstance(codec.pack(x)[1], SampledMeta)
    # the norms are not part of the format, so equality ignores them
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
@pytest.mark.parametrize("numbered", [False, True])
def test_a_model_whose_loss_looks_at_one_token(numbered: bool, checkpointing: bool) -> None:
    """In the second epoch tokens with a large gradient are sampled, whether the user numbers the samples or not."""
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
    norms = None
    if numbered:
        norms = GradientNorms(model, samples=3, positions=13)
        assert len(norms.sites) == len([m for m in model.modules() if isinstance(m, torch.nn.Linear)])
    else:
        patch_model(model, replace(config, gradient_norms=8))
        assert {len(cache.seen) for cache in remembered(model)} == {0}
    mean_error(model, batch, truth, norms)
    assert mean_error(model, batch, truth, norms) < 0.7 * without


def remembered(model: torch.nn.Module) -> list[RememberedNorms]:
    codecs = [s.codec for m in model.modules() if (s := settings_of(m)) is not None and isinstance(s.codec, RowSample)]
    return [codec.norms for codec in codecs if isinstance(codec.norms, RememberedNorms)]


def test_what_is_remembered_is_what_a_cache_of_numbered_samples_has() -> None:
    _, dy = activations()
    ours, numbered = RememberedNorms(8), SiteNorms(6, T)
    for gradient in (dy, 3 * dy):
        # in the first round all three samples are new to both caches
        torch.testing.assert_close(ours.expect(B * T, 10**12 + SAMPLES), numbered.expect(B * T, SAMPLES))
        for cache, samples in ((ours, 10**12 + SAMPLES), (numbered, SAMPLES)):
            cache.note(gradient.flatten(0, 1), samples)
            # a second consumer of the same x has the same gradient
            cache.note(gradient.flatten(0, 1), samples)
    mixed = torch.tensor([0, 5, 4])
    torch.testing.assert_close(ours.expect(B * T, 10**12 + mixed), numbered.expect(B * T, mixed))
    # a shorter batch, and a longer one than any before
    assert ours.expect(2 * B, 10**12 + SAMPLES).shape == (2 * B,)
    longer = ours.expect(B * (T + 4), 10**12 + SAMPLES).view(B, -1)
    assert bool((longer[:, T:] < longer[:, :T].min()).all()) and bool((longer > 0).all())


def test_the_oldest_samples_are_forgotten_and_a_copy_knows_none() -> None:
    norms = RememberedNorms(3)
    for number in range(5):
        norms.note(torch.full((2, 4), float(number + 1)), torch.tensor([number, number + 100]))
    assert norms.squares.shape == (3, 1) and sorted(norms._row) == [4, 103, 104]
    assert norms.expect(2, torch.tensor([4, 0]))[0] == pytest.approx(10 + 0.1 * 10)
    assert copy.deepcopy(norms).squares.numel() == 0 == len(pickle.loads(pickle.dumps(norms)).seen)


def test_a_sample_is_known_by_its_ids_wherever_the_batch_ends() -> None:
    def numbers(*args: Any, **kwargs: Any) -> list[int]:
        found = samples_of_call(model, arguments(model.forward, args, kwargs))
        assert found is not None
        return found.tolist()

    model = BY_NAME["bert"].build()
    ids = torch.tensor([[5, 6, 7, 0], [5, 6, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    long, short = numbers(ids, mask)
    assert long != short and [short] == numbers(input_ids=ids[1:, :2]) == numbers(
        ids[1:, :3], attention_mask=mask[1:, :3]
    )
    assert numbers(ids) != [long, short]
    with torch.no_grad():
        assert samples_of_call(model, {"input_ids": ids}) is None


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_feeds_it(tmp_path: Path) -> None:
    """In its second epoch, training uses the norms of the first. The user passes only the name of the preset."""
    family = BY_NAME["bert"]
    batch = family.make_batch("right")
    rows = [{key: value[i] for key, value in batch.items()} for i in range(len(batch["input_ids"]))]
    arguments = TrainingArguments(str(tmp_path), num_train_epochs=2, per_device_train_batch_size=1, report_to=[],
                                  save_strategy="no", use_cpu=True, disable_tqdm=True)  # fmt: skip
    model = family.build()
    Trainer(model, arguments, train_dataset=rows, callbacks=[ActCompressCallback("wtacrs")]).train()
    caches = remembered(model)
    assert caches and all(len(cache._numbers) in (0, len(rows)) for cache in caches)
    assert sum(bool(cache.squares.any()) for cache in caches) >= 6


def test_it_says_what_is_missing() -> None:
    with pytest.raises(UnknownOptionError, match="the codec for linear cannot be 'int8'; allowed: 'wtacrs30'"):
        CompressionConfig(linear="int8", gradient_norms=10)
    # an override with another codec switches the norms off for that module
    assert CompressionConfig.from_preset("wtacrs", overrides=(("a", "linear", "int8"),)).at("a").gradient_norms == 0
    with pytest.raises(NotPatchedError, match="sampled"):
        GradientNorms(patch_model(BY_NAME["bert"].build()), 3, 13)
