"""Models with "flash_attention_2": the kernel finds packed sequences itself, and nothing of T x T is made.

No kernel of that package runs on a CPU. Here a function with the same arguments replaces it.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_actcompress import CompressionConfig, kept_bytes, memory_report, patch_model
from hf_actcompress.reference import packed_sdpa
from hf_actcompress.reference.sequences import Band, Sequences, sequences_of
from tests.families import BODY, BY_NAME, Batch, build, differing, relative_error, step
from tests.layers.plans import LEAVES, PLANS, assert_same, calls
from tests.models.test_packed import GEMMA3, packed, rows, watched_step

NAME = "flash_attention_2"


def flash_attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
    sliding_window: int | None = None, position_ids: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Causal attention inside of each sequence of packed rows. `attention_mask` is 2-D or None."""
    if q.is_meta:
        raise NotImplementedError("a kernel of another package")
    b, _h, t, _d = q.shape
    found = sequences_of(position_ids) if position_ids is not None and attention_mask is None else None
    of: Sequences | Band = found or Sequences(b, t, tuple(range(0, b * t + 1, t)))
    real = None if attention_mask is None else attention_mask.bool()
    if real is not None:
        of = Band(b, t, True)
    return packed_sdpa(q, k, v, of, sliding_window, scaling, real), None


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each call of the kernel: whether gradients were enabled."""
    calls: list[bool] = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append(torch.is_grad_enabled())
        return flash_attention(*args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, NAME, noted)
    return calls


def with_kernel(family: Any, mode: str, **options: Any) -> Any:
    model = build(family, mode, **options)
    # `set_attn_implementation` would look for the package
    model.config._attn_implementation_internal = NAME
    return model


def batch_of(given: str) -> Batch:
    if given == "packed":
        return packed(rows(), return_flash_attn_kwargs=True)
    return BY_NAME["llama"].make_batch("right" if given == "padding" else "none")


@pytest.mark.parametrize("family", [BY_NAME["llama"], BY_NAME["qwen3"], GEMMA3], ids=lambda family: family.name)
@pytest.mark.parametrize("given", ["nothing", "padding", "packed"])
@pytest.mark.parametrize(
    "config", [BODY, "long", CompressionConfig(checkpoint="every:1")], ids=["exact", "long", "all"]
)
def test_gradients_are_stocks(family: Any, given: str, config: Any, kernel: list[bool]) -> None:
    stock, batch = with_kernel(family, "fp32"), batch_of(given)
    ours = patch_model(copy.deepcopy(stock), config)
    kernel.clear()
    loss, expected = step(stock, batch)
    assert len(kernel) == 2
    found, grads = step(ours, batch)
    assert len(kernel) == (4 if config in (BODY, "long") else 6)
    # without logits the loss may differ in its last bit
    torch.testing.assert_close(found, loss, rtol=1e-6 if config == "long" else 0, atol=0)
    assert grads.keys() == expected.keys()
    assert relative_error(grads, {name: grad.double() for name, grad in expected.items()}) < 1e-5


@pytest.mark.parametrize("given", ["nothing", "packed"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "bert", "gpt2-gelu-tanh", "opt", "modernbert"])
def test_layers_run_by_plans_around_it(name: str, given: str) -> None:
    """The kernel gets what stock gives it, also for packed rows. Bits are stock's.

    No more bytes are kept than module by module. They are compared without the net, because there the net also sees how
    Qwen3's keys follow from a norm's output.
    """
    family = BY_NAME[name]
    if given == "packed" and name not in ("llama", "qwen3", "phi3"):
        pytest.skip("a model without packed rows")
    stock = with_kernel(family, "fp32")
    batch = family.make_batch("none") if given == "nothing" else batch_of(given)
    plans = patch_model(copy.deepcopy(stock), PLANS)
    assert_same(plans, stock, batch)
    assert calls(plans) == [1, 1]
    bare = [patch_model(copy.deepcopy(stock), replace(options, net=False)) for options in (LEAVES, PLANS)]
    kept = [kept_bytes(lambda model=model: model(**batch), "cpu") for model in (*bare, plans)]
    assert calls(bare[1]) == [1, 1] and kept[2] <= kept[1] <= kept[0]


def test_a_report_gives_its_bytes_to_the_attention() -> None:
    batch = BY_NAME["llama"].make_batch("none")
    of = {}
    for options in (LEAVES, PLANS):
        report = memory_report(patch_model(with_kernel(BY_NAME["llama"], "fp32"), options), batch)
        of[options] = sum(row.patched_bytes for row in report.rows if row.module.endswith("self_attn"))
    assert of[PLANS] == of[LEAVES] > 0


def test_it_may_look_at_rows_that_are_left_out() -> None:
    leaves, plans = (
        patch_model(with_kernel(BY_NAME["llama"], "fp32"), replace(options, drop_padding=True))
        for options in (LEAVES, PLANS)
    )
    assert_same(plans, leaves, batch_of("padding"))
    assert calls(plans) == [0, 0]


def test_in_bf16_bits_are_stocks() -> None:
    stock, batch = with_kernel(BY_NAME["llama"], "bf16"), batch_of("packed")
    loss, expected = step(stock, batch)
    found, grads = step(patch_model(stock, BODY), batch)
    assert torch.equal(found, loss) and not differing(grads, expected)


def test_sixteen_sequences_of_512_make_nothing_of_all_tokens_by_all_tokens() -> None:
    model = patch_model(with_kernel(BY_NAME["llama"], "fp32"), "exact")
    assert watched_step(model, packed(rows((512,) * 16)), "fp32")[2] < 8192**2 / 8
