"""An estimate may run beside a training or another estimate: none of them affects the others."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
import torch._library.fake_impl as fake_impl
import transformers as hf
from torch import Tensor
from torch.nn.modules import module as nn_module

from hf_actcompress import Estimate, estimate, patch_model
from hf_actcompress.memory.estimation.meta_device import ONE_AT_A_TIME
from hf_actcompress.memory.estimation.meta_model import skeleton

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.daily(3)]
STEPS, VOCAB = 40, 97
LLAMA = hf.LlamaConfig(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, use_cache=False,
)  # fmt: skip
# dropout at its default: the training draws from the generator that all threads share
GPT2 = hf.GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, use_cache=False, bos_token_id=0, eos_token_id=0)
MODELS: dict[str, Callable[[], Any]] = {
    "llama": partial(hf.LlamaForCausalLM, LLAMA),
    "gpt2": partial(hf.GPT2LMHeadModel, GPT2),
}
# these need other kernels, chunks, offloading, masks, generator states and default dtypes than the training beside them
ESTIMATES: tuple[Callable[[], Estimate], ...] = (
    partial(estimate, LLAMA, batch_size=2, seq_len=32, config="int8", dtype="bfloat16"),
    partial(estimate, GPT2, batch_size=2, seq_len=32, config="exact", device="cpu", gradient_checkpointing=True),
    partial(estimate, LLAMA, batch_size=3, seq_len=16, config="offload", gradient_checkpointing=True),
    partial(estimate, GPT2, batch_size=2, seq_len=16, config="tempo", device="cpu", autocast="bfloat16"),
)


class Beside(threading.Thread):
    """Makes estimates, one after the other, until it is told to stop."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self._first, self._stop_now = first, threading.Event()
        self.made, self.errors = 0, list[BaseException]()

    def run(self) -> None:
        try:
            for make in cycle(ESTIMATES[self._first :] + ESTIMATES[: self._first]):
                make()
                self.made += 1
                if self._stop_now.is_set() and self.made >= len(ESTIMATES):
                    return
        except BaseException as error:
            self.errors.append(error)

    def end(self) -> None:
        self._stop_now.set()
        self.join()
        assert not self.errors
        assert self.made >= len(ESTIMATES)


@contextmanager
def estimating(threads: int = 1) -> Iterator[list[Beside]]:
    beside = [Beside(first) for first in range(threads)]
    for thread in beside:
        thread.start()
    try:
        yield beside
    finally:
        for thread in beside:
            thread.end()


def training(name: str, preset: str) -> Callable[[], list[Tensor]]:
    """Gradients of one step, always with the same weights, batch and masks."""
    torch.manual_seed(0)
    model = patch_model(MODELS[name](), preset).train()
    ids = torch.randint(VOCAB, (2, 24))
    mask = torch.ones_like(ids)
    mask[0, 20:] = 0

    def step() -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    return step


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(map(torch.equal, found, expected))


@pytest.mark.parametrize("preset", ["exact", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_a_training_beside_estimates_is_bit_equal(name: str, preset: str) -> None:
    step = training(name, preset)
    expected = step()
    with estimating() as beside:
        count = 0
        while count < STEPS or (beside[0].is_alive() and beside[0].made < len(ESTIMATES)):
            assert equal(step(), expected), f"step {count}"
            count += 1


def attributes() -> dict[tuple[str, str], Any]:
    """Callable attributes of modules of torch and this package, of `masking_utils`, and of this package's classes."""
    found: dict[tuple[str, str], Any] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("torch", "hf_actcompress") and name != "transformers.masking_utils":
            continue
        for attribute, value in list(vars(module).items()):
            if callable(value):
                found[name, attribute] = value
            if isinstance(value, type) and value.__module__ == name and name.startswith("hf_actcompress"):
                found.update({(f"{name}.{attribute}", key): inner for key, inner in list(vars(value).items())})
    return found


def exchanged(before: dict[tuple[str, str], Any]) -> list[tuple[str, str]]:
    """Attributes that are another object now, or are gone. Modules that were loaded later do not count."""
    now = attributes()
    return [key for key, value in before.items() if now.get(key) is not value]


class Watched(hf.LlamaForCausalLM):
    """Calls `look` in the forward and in the backward of the step that an estimate runs."""

    look: Callable[[], None]

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        Watched.look()
        out = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        out.loss.register_hook(lambda _: Watched.look())
        return out


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("preset", ["stock", "int8", "offload"])
def test_nothing_of_the_process_is_exchanged(preset: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def look() -> None:
        seen.append(exchanged(before))
        hooks = (nn_module._global_forward_hooks, nn_module._global_forward_pre_hooks)
        seen.append([hook for known in hooks for hook in known.values()])

    monkeypatch.setattr(Watched, "look", staticmethod(look), raising=False)
    model = Watched(LLAMA)
    options = {"batch_size": 2, "seq_len": 16, "config": preset, "device": device, "gradient_checkpointing": True}
    before = attributes()
    # the first estimate does the lazy imports
    estimate(model, **options)
    seen.clear()
    before = attributes()
    estimate(model, **options)
    assert len(seen) >= 4 and not any(seen), seen


def test_the_generator_of_the_process_is_not_set_while_layers_are_computed_again() -> None:
    found: list[int] = []

    class Reseeding(torch.nn.Identity):
        """Changes the state of the generator, as a training beside the estimate does."""

        def forward(self, input: Tensor) -> Tensor:
            found.append(torch.initial_seed())
            torch.manual_seed(len(found))
            return input

    model = hf.LlamaForCausalLM(LLAMA)
    for layer in model.model.layers:
        layer.input_layernorm = torch.nn.Sequential(layer.input_layernorm, Reseeding())
    model.gradient_checkpointing_enable()
    torch.manual_seed(0)
    estimate(model, batch_size=2, seq_len=16, config="stock", device="cpu")
    # in the forward and in the recomputation, each call finds the seed that the call before it has set
    assert len(found) > len(model.model.layers)
    assert [*found, torch.initial_seed()] == list(range(len(found) + 1))


def test_two_estimates_at_once_are_those_of_each_alone_and_leave_nothing_behind() -> None:
    step = training("llama", "int8")
    expected, alone = step(), [make().to_json() for make in ESTIMATES]
    before, collecting = attributes(), gc.isenabled()
    found: dict[int, list[str]] = {0: [], 1: []}

    def make_all(order: int) -> None:
        for make in ESTIMATES[order:] + ESTIMATES[:order]:
            found[order].append(make().to_json())

    threads = [threading.Thread(target=make_all, args=(order,)) for order in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {order: alone[order:] + alone[:order] for order in found}
    assert not exchanged(before) and gc.isenabled() == collecting
    assert equal(step(), expected)


def test_the_default_dtype_and_device_stay_while_a_model_is_made() -> None:
    seen = set()
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.add((torch.get_default_dtype(), torch.utils._device.CURRENT_DEVICE))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        for _ in range(3):
            skeleton(LLAMA, torch.bfloat16, None, False)
    finally:
        done.set()
        thread.join()
    assert seen == {(torch.get_default_dtype(), torch.utils._device.CURRENT_DEVICE)}


MADE = [
    LLAMA,
    GPT2,
    hf.BertConfig(num_hidden_layers=1, architectures=["BertForMaskedLM"]),
    hf.T5Config(num_layers=1, num_decoder_layers=1),
    # this model's code reads the default dtype
    hf.M2M100Config(encoder_layers=1, decoder_layers=1, architectures=["M2M100ForConditionalGeneration"]),
    # this model takes the dtype of its config
    hf.ApertusConfig(num_hidden_layers=1, hidden_size=64, intermediate_size=64, vocab_size=VOCAB),
    # this model has parameters that are in fp32 whatever the dtype
    hf.MambaConfig(num_hidden_layers=1),
    hf.LlavaConfig(
        text_config={"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64, "vocab_size": VOCAB},
        vision_config={"model_type": "clip_vision_model", "num_hidden_layers": 1},
        architectures=["LlavaForConditionalGeneration"],
    ),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", MADE, ids=lambda config: config.model_type)
def test_a_model_is_made_as_transformers_makes_it(config: Any, dtype: torch.dtype) -> None:
    def tensors(model: Any) -> dict[str, Any]:
        found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {name: (x.shape, x.dtype, x.device.type, type(x)) for name, x in found.items()}

    found = skeleton(config, dtype, None, False)
    with torch.device("meta"):
        expected = type(found)._from_config(config, dtype=dtype)
    expected.tie_weights()
    assert tensors(found) == tensors(expected)
    assert found.config.dtype == dtype and found.config.to_dict() == {**expected.config.to_dict(), "use_cache": False}


def test_what_sets_a_global_of_torch_runs_in_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sets it for many ops of fake tensors and of those of the meta device, and then restores it."""
    alone: list[bool] = []
    set_getter = fake_impl.set_ctx_getter

    def noted(getter: Any) -> Any:
        alone.append(ONE_AT_A_TIME._is_owned())  # type: ignore[attr-defined]
        return set_getter(getter)

    monkeypatch.setattr(fake_impl, "set_ctx_getter", noted)
    for make in ESTIMATES:
        make()
    assert alone and all(alone)
