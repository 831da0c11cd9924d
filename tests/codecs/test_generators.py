"""Each model has its own generators for stochastic codecs: no other model and no measurement changes their state."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_actcompress import CompressionConfig, calibrate, fidelity_report, memory_report, patch_model, patched
from hf_actcompress.codecs import Offload
from hf_actcompress.codecs.table import CODECS
from hf_actcompress.memory.measurement.training_restored import training_restored
from hf_actcompress.models.root import root_of
from hf_actcompress.reference.rng import Generators, seed_codecs
from tests.families import BY_NAME

pytestmark = pytest.mark.filterwarnings("ignore")
# one config rounds stochastically in every role that allows it, the other samples the inputs of linears
CONFIGS = {
    "rounded": CompressionConfig(linear="int4_stochastic", norm="int4_stochastic", mlp="int4_stochastic"),
    "sampled": CompressionConfig(linear="wtacrs30"),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
FAMILY = BY_NAME["llama"]
Steps = list[dict[str, Tensor]]


def model_of(config: CompressionConfig | str, seed: int | None = None, checkpointing: bool = False) -> Any:
    model = FAMILY.build()
    if checkpointing:
        model.gradient_checkpointing_enable()
    return patch_model(model, config, seed=seed).train()


def step(model: Any) -> dict[str, Tensor]:
    """Gradients for fixed weights and a fixed batch: two steps differ only in the numbers that codecs draw."""
    model.zero_grad()
    model(**FAMILY.make_batch("none")).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def steps(model: Any, count: int = 3) -> Steps:
    return [step(model) for _ in range(count)]


def same(found: Steps, expected: Steps) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a) for a, b in pairs)


@every_config
@pytest.mark.parametrize("checkpointing", [False, True])
def test_two_models_in_turn_draw_what_each_draws_alone(config: CompressionConfig, checkpointing: bool) -> None:
    alone = [steps(model_of(config, seed, checkpointing)) for seed in (1, 2)]
    # every step draws new numbers, and another seed gives other numbers
    assert not same(alone[0][:1], alone[0][1:2]) and not same(alone[0], alone[1])
    models = [model_of(config, seed, checkpointing) for seed in (1, 2)]
    in_turn: list[Steps] = [[], []]
    for _ in range(3):
        for model, found in zip(models, in_turn, strict=True):
            found.append(step(model))
    assert same(in_turn[0], alone[0]) and same(in_turn[1], alone[1])


@every_config
def test_patching_another_model_changes_no_draw(config: CompressionConfig) -> None:
    expected = steps(model_of(config))
    model = model_of(config)
    found = steps(model, 1)
    for other in (model_of(config), model_of(config, seed=5)):
        step(other)
    seed_codecs(7)
    assert same([*found, *steps(model, 2)], expected)


def test_two_models_in_two_threads_draw_what_each_draws_alone() -> None:
    config = CONFIGS["rounded"]
    alone = [steps(model_of(config, seed), 5) for seed in (1, 2)]
    models, found = [model_of(config, seed) for seed in (1, 2)], [Steps(), Steps()]
    threads = [threading.Thread(target=lambda i=i: found[i].extend(steps(models[i], 5))) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same(found[0], alone[0]) and same(found[1], alone[1])


def test_a_seed_starts_the_model_again_and_no_seed_does_not() -> None:
    config = CONFIGS["rounded"]
    model = model_of(config, seed=3)
    first, second = steps(model, 2)
    # patching again with the same config does not restart the generators
    third = step(patch_model(model, config))
    assert not same([first], [second]) and not same([first], [third])
    assert same(steps(patch_model(model, config, seed=3), 3), [first, second, third])


def test_another_config_goes_on_with_the_models_generators() -> None:
    model = model_of("int8", seed=3)
    generators = root_of(model).generators
    patch_model(model, CONFIGS["rounded"])
    assert root_of(model).generators is generators
    first = step(model)
    with patched(model, "exact"):
        step(model)
    assert root_of(model).generators is generators and not same([step(model)], [first])


def saved_and_loaded(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
}


@every_config
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_goes_on_from_there_on_its_own(copied: Callable[[Any], Any], config: CompressionConfig) -> None:
    expected = steps(model_of(config, seed=4), 4)
    model = model_of(config, seed=4)
    steps(model, 1)
    other = copied(model)
    assert same(steps(other, 3), expected[1:])
    assert same(steps(model, 3), expected[1:])


def measured(model: Any, what: str) -> None:
    batch = FAMILY.make_batch("none")
    if what == "fidelity":
        fidelity_report(model, batch, seeds=2)
    elif what == "fidelity of another preset":
        fidelity_report(model, batch, "sampled", seeds=2)
    elif what == "calibration":
        calibrate(model, batch)
    elif what == "memory report":
        memory_report(model, batch)
    else:
        with training_restored(model):
            steps(model, 2)


@pytest.mark.daily(3)
@every_config
@pytest.mark.parametrize(
    "what", ["fidelity", "fidelity of another preset", "calibration", "memory report", "training restored"]
)
def test_a_measurement_leaves_the_draws_as_they_were(what: str, config: CompressionConfig) -> None:
    expected = steps(model_of(config))
    model = model_of(config)
    found = steps(model, 1)
    measured(model, what)
    assert same([*found, *steps(model, 2)], expected)


def test_a_measurement_leaves_the_generators_of_the_process_as_they_were() -> None:
    x, codec = torch.randn(16, 64), CODECS["int4_stochastic"]
    seed_codecs(1)
    expected = [codec.pack(x)[0][0] for _ in range(2)]
    seed_codecs(1)
    first = codec.pack(x)[0][0]
    fidelity_report(FAMILY.build(), FAMILY.make_batch("none"), CONFIGS["rounded"], seeds=1)
    assert torch.equal(first, expected[0]) and torch.equal(codec.pack(x)[0][0], expected[1])


@pytest.mark.parametrize("name", sorted(CODECS))
def test_a_codec_that_draws_is_the_same_format_with_other_numbers(name: str) -> None:
    codec, generators = CODECS[name], Generators(1)
    bound = codec.drawing_from(generators)
    assert bound == codec and hash(bound) == hash(codec) and repr(bound) == repr(codec)
    x = torch.randn(2, 24, 64)
    seed_codecs(1)
    alike = torch.equal(codec.pack(x)[0][0], codec.pack(x)[0][0])
    # the same seed gives the same numbers again. A codec that draws none is returned as it is
    first = bound.pack(x)[0][0]
    generators.restart(1)
    assert torch.equal(bound.pack(x)[0][0], first)
    assert (bound is codec) == alike


def test_offloading_binds_what_it_stores() -> None:
    x, generators = torch.randn(4, 64), Generators(1)
    codec = Offload(CODECS["int4_stochastic"]).drawing_from(generators)
    assert isinstance(codec, Offload)
    first = codec.pack(x)[0][0]
    generators.restart(1)
    assert torch.equal(CODECS["int4_stochastic"].drawing_from(generators).pack(x)[0][0], first)


def test_processes_and_devices_have_generators_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")

    def drawn(rank: int) -> Tensor:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
        return torch.rand(8, generator=Generators(3).on(cpu))

    assert torch.equal(drawn(0), drawn(0)) and not torch.equal(drawn(0), drawn(1))
