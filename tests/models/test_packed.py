"""Rows of packed sequences: attention stays inside of each sequence, and no tensor has all tokens by all tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import DataCollatorWithFlattening, masking_utils
from transformers.models.llama import modeling_llama

from hf_actcompress import CompressionConfig, memory_report, patch_model, unpatch_model
from hf_actcompress.memory.measurement.allocator import allocator_events, collected
from hf_actcompress.models import packed_masks
from hf_actcompress.ops import PackedMask
from hf_actcompress.private_apis import FakeTensorMode
from hf_actcompress.reference import packed_attention_bwd, packed_attention_fwd, packed_kernel, packed_sdpa, sequences
from tests.families import (
    BODY,
    BY_NAME,
    VOCAB,
    Batch,
    Family,
    build,
    differing,
    oracle_step,
    relative_error,
    step,
)
from tests.oracle import EXACT

LLAMA = BY_NAME["llama"]
LENGTHS = (20, 20, 3, 20, 1, 1, 30, 17)
_GEMMA = {
    **LLAMA.options, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
GEMMA2 = Family("gemma2", "Gemma2Config", _GEMMA, "Gemma2ForCausalLM", ("attention_dropout",))
GEMMA3 = Family("gemma3", "Gemma3TextConfig", _GEMMA, "Gemma3ForCausalLM", ("attention_dropout",))
FAMILIES = (LLAMA, BY_NAME["qwen3"], BY_NAME["mistral"], GEMMA3)


def rows(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (n,), generator=generator) for n in lengths]


def packed(sequences: list[Tensor], **options: bool) -> Batch:
    """The batch that transformers' collator makes: one row, positions, labels without each sequence's first token."""
    features = [{"input_ids": ids.tolist()} for ids in sequences]
    return dict(DataCollatorWithFlattening(**options)(features))


@pytest.fixture
def stock_masks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens there are in each mask that stock has made."""
    made: list[int] = []
    own = masking_utils.packed_sequence_mask_function

    def noted(packed_sequence_mask: Tensor) -> Any:
        made.append(packed_sequence_mask.shape[-1])
        return own(packed_sequence_mask)

    monkeypatch.setattr(masking_utils, "packed_sequence_mask_function", noted)
    return made


def watched_step(model: Any, batch: Batch, mode: str) -> tuple[Tensor, dict[str, Tensor], int]:
    """Loss and gradients, and the size of the largest block of memory that the step has allocated."""
    with collected(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss, grads = step(model, batch, mode)
    return loss, grads, max(size for _, _, size in allocator_events(profiler)[0])


@pytest.mark.daily(2)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_sixteen_sequences_of_512_are_sixteen_rows(family: Family, stock_masks: list[int]) -> None:
    """Compares gradients with those of separate rows in fp64. No block of memory may hold all tokens by all tokens."""
    window = {"sliding_window": 100} if "sliding_window" in family.options else {}
    sequences = rows((512,) * 16)
    apart = {"input_ids": torch.stack(sequences), "labels": torch.stack(sequences)}
    oracle = oracle_step(build(family, "fp32", **window), apart)
    for mode in ("fp32", "bf16"):
        model = build(family, mode, **window)
        expected_loss, expected = step(model, apart, mode)
        loss, grads, size = watched_step(patch_model(model, BODY), packed(sequences), mode)
        assert not stock_masks and size < 8192**2 / 8
        torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
        assert relative_error(grads, oracle) <= EXACT * relative_error(expected, oracle)


@pytest.mark.parametrize("family", [*FAMILIES, BY_NAME["phi3"]], ids=lambda family: family.name)
@pytest.mark.parametrize("mode", ["fp32", "bf16", "autocast"])
def test_two_rows_of_sequences_of_any_lengths(
    family: Family, mode: str, stock_masks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares with stock's masks: equal neighbours, sequences of one token, windows that move in several steps."""
    monkeypatch.setattr(sequences, "WINDOW_STEP", 4)
    looks = []
    own = packed_masks.sequences_of
    monkeypatch.setattr(packed_masks, "sequences_of", lambda positions: (looks.append(1), own(positions))[1])
    batches = packed(rows()), packed(rows()[::-1])
    batch = {name: torch.cat([b[name] for b in batches]) for name in ("input_ids", "position_ids", "labels")}
    stock = build(family, mode)
    oracle = oracle_step(stock, batch)
    _, expected = step(stock, batch, mode)
    stock_masks.clear()
    _, grads = step(patch_model(stock, BODY), batch, mode)
    assert not stock_masks and len(looks) == 1
    assert relative_error(grads, oracle) <= EXACT * relative_error(expected, oracle)


def checkpointed(model: Any, reentrant: bool) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model


def with_lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))


def frozen_below(model: Any) -> Any:
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return model


WAYS: dict[str, tuple[Callable[[Any], Any], Any, float]] = {
    "checkpointed": (lambda model: checkpointed(model, False), "exact", 1e-5),
    "checkpointed_reentrant": (lambda model: checkpointed(model, True), "exact", 1e-5),
    "lora": (with_lora, "exact", 1e-5),
    "frozen_below": (frozen_below, "exact", 1e-5),
    "plans": (lambda model: model, CompressionConfig(plans=True), 1e-5),
    "recomputed": (lambda model: model, CompressionConfig(attention_variant="recomputed"), 1e-5),
    "int8": (lambda model: model, "int8", 0.01),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
def test_in_every_way_to_train(way: str, stock_masks: list[int]) -> None:
    """The batch has the keywords that the collator makes for flash kernels."""
    prepare, config, tolerance = WAYS[way]
    batch = packed(rows(), return_flash_attn_kwargs=True, return_seq_idx=True)
    stock, ours = prepare(LLAMA.build()), prepare(patch_model(LLAMA.build(), config))
    _, expected = step(stock, batch)
    stock_masks.clear()
    _, grads = step(ours, batch)
    assert not stock_masks
    assert relative_error(grads, {name: grad.double() for name, grad in expected.items()}) < tolerance
    if way == "plans":
        assert ours.model.layers[0].actcompress.plans.calls == 1


T = sum(LENGTHS)
STOCK: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a mask": ({"attention_mask": torch.ones(1, T, dtype=torch.long)}, {}),
    "a mask of tokens by tokens": ({"attention_mask": torch.ones(1, 1, T, T).tril().bool()}, {}),
    "a cache": ({"use_cache": True}, {}),
    "attention's dropout": ({}, {"dropout": 0.1}),
    "eager attention": ({}, {"attn_implementation": "eager"}),
    "attentions asked for": ({"output_attentions": True}, {"attn_implementation": "eager"}),
    "one sequence": ({"position_ids": torch.arange(T)[None]}, {}),
    "two rows of one": ({"input_ids": torch.ones(2, T, dtype=torch.long), "labels": torch.ones(2, T, dtype=torch.long),
                         "position_ids": torch.arange(T)[None]}, {}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", STOCK)
def test_stock_decides_in_all_other_calls(case: str) -> None:
    inputs, options = STOCK[case]
    batch = {**packed(rows()), **inputs}
    stock = LLAMA.build(torch.bfloat16, **options)
    loss, grads = step(patch_model(copy.deepcopy(stock), BODY), batch)
    expected_loss, expected = step(stock, batch)
    assert torch.equal(loss, expected_loss) and not differing(grads, expected)


def test_few_tokens_of_gemma2_keep_stocks_mask() -> None:
    """Its eager attention runs some rows at a time only from 1,024 tokens on (test_attention_rows.py)."""
    stock = GEMMA2.build(torch.bfloat16)
    batch = packed(rows())
    loss, grads = step(patch_model(copy.deepcopy(stock), BODY), batch)
    expected_loss, expected = step(stock, batch)
    assert torch.equal(loss, expected_loss) and not differing(grads, expected)


@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_get_stocks_mask(stock_masks: list[int]) -> None:
    model = patch_model(LLAMA.build())
    for layer in model.model.layers:
        layer.compile(backend="eager")
    step(model, packed(rows()))
    assert stock_masks == [T]


def test_no_grad_and_unpatched_models_run_stocks_code(stock_masks: list[int]) -> None:
    model, batch = LLAMA.build(), packed(rows())
    before = step(model, batch)
    patch_model(model, BODY)
    with torch.no_grad():
        assert torch.equal(model(**batch).loss, before[0])
    assert len(stock_masks) == 2
    loss, grads = step(unpatch_model(model), batch)
    assert len(stock_masks) == 3 and torch.equal(loss, before[0]) and not differing(grads, before[1])


def test_an_exchanged_maker_of_masks_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, calls = patch_model(LLAMA.build()), packed(rows()), []
    step(model, batch)
    own = modeling_llama.create_causal_mask
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **kwargs: (calls.append(1), own(**kwargs))[1])
    step(model, batch)
    assert calls


def test_whoever_reads_the_mask_gets_stocks(stock_masks: list[int]) -> None:
    seen: list[Any] = []
    model = patch_model(LLAMA.build())
    attention = model.model.layers[0].self_attn
    attention.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True)
    batch = packed(rows())
    step(model, batch)
    mask = seen[0]
    assert isinstance(mask, PackedMask) and mask.shape == (1, 1, T, T) and mask.dtype == torch.bool and not stock_masks
    of = torch.repeat_interleave(torch.tensor(LENGTHS))
    assert torch.equal(mask & True, ((of[:, None] == of[None]) & torch.ones(T, T).tril().bool())[None, None])
    assert mask[..., :5].shape == (1, 1, T, 5) and stock_masks == [T]


def test_memory_report_sees_what_packed_batches_keep() -> None:
    """What a patched model keeps grows in proportion to the tokens. What stock keeps grows faster."""
    model = LLAMA.build()
    once, twice = (memory_report(model, packed(rows(LENGTHS * n))) for n in (4, 8))
    assert twice.patched_bytes < 2.02 * once.patched_bytes
    assert twice.stock_bytes > 2.2 * once.stock_bytes


@pytest.mark.parametrize(("kernel", "dtype"), [("flash", torch.bfloat16), ("efficient", torch.float32)])
@pytest.mark.parametrize("window", [None, 4])
def test_calls_of_cudas_kernels_fit_their_signatures(kernel: str, dtype: torch.dtype, window: int | None) -> None:
    """The tensors have no values. A device compares a kernel's results with those of "pieces" before it uses it."""
    of = sequences.Sequences(2, 40, (0, 3, 20, 40, 61, 80))
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 40, h, 16, device="cuda", dtype=dtype).transpose(1, 2) for h in (4, 2, 2))
        bounds = torch.empty(6, dtype=torch.int32, device="cuda")
        out, lse = packed_attention_fwd(q, k, v, bounds, of, window, None, kernel)
        assert out.shape == q.shape and out.stride() == q.stride() and not out._is_view()
        if kernel == "efficient" and window:
            return  # torch's function for such tensors does not know the argument
        grads = packed_attention_bwd(torch.empty_like(out), q, k, v, out, lse, bounds, of, window, None, kernel)
        assert [dx.shape for dx in grads] == [x.shape for x in (q, k, v)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu_one_of_its_kernels_runs(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, T, h, 64, device="cuda", dtype=dtype).transpose(1, 2) for h in (4, 2, 2))
    starts = tuple(sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1))
    of = sequences.Sequences(1, T, starts)
    for window in (None, 6):
        kernel = packed_kernel(q, k, v, of, window)
        assert kernel == ("flash" if dtype == torch.bfloat16 else "efficient")
        bounds = torch.tensor(starts, dtype=torch.int32, device="cuda")
        out, _ = packed_attention_fwd(q, k, v, bounds, of, window, None, kernel)
        truth = packed_sdpa(q.double(), k.double(), v.double(), of, window, None).transpose(1, 2)
        torch.testing.assert_close(out.double(), truth, rtol=0.02, atol=0.02)


def test_a_kernel_that_does_not_run_is_not_used() -> None:
    q = torch.randn(1, 4, 6, 8)
    of = sequences.Sequences(1, 6, (0, 2, 6))
    assert packed_kernel(q, q, q, of, None) is None
    from hf_actcompress.reference.packed_kernels import _agrees

    assert not any(_agrees(kernel, q.device, torch.bfloat16, 8, 1, False) for kernel in ("flash", "efficient"))
    # "pieces" runs in its place
    truth, _ = packed_attention_fwd(q, q, q, torch.tensor(of.starts), of, None, None, "pieces")
    torch.testing.assert_close(packed_sdpa(q, q, q, of, None, None), truth.transpose(1, 2))
