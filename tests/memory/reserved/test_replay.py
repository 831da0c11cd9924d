"""A replayed training has the trace of the whole model, and reserves memory by the rules of CUDA's allocator."""

from __future__ import annotations

import pytest
import transformers as hf

from hf_actcompress import estimate
from hf_actcompress.memory.estimation.estimates import Estimates
from hf_actcompress.memory.estimation.extrapolation import Extrapolated
from hf_actcompress.memory.estimation.fake_step.cuda_rules import BLOCK
from hf_actcompress.memory.estimation.fake_step.step import run_step
from hf_actcompress.memory.estimation.reserved.caching_allocator import CachingAllocator
from hf_actcompress.memory.estimation.reserved.repeated import Trace
from hf_actcompress.memory.estimation.reserved.replay import Held, replay, reserved_share
from hf_actcompress.memory.estimation.reserved.trace import trace_of

MIB = 2**20
SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 7}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS = {
    "llama": hf.LlamaConfig(**SIZES, **HEADS),
    "bert": hf.BertConfig(**SIZES, num_attention_heads=4, architectures=["BertForMaskedLM"]),
    "gpt2": hf.GPT2Config(vocab_size=512, n_embd=256, n_layer=7, n_head=4),
}
CASES = [(name, preset, checkpointing) for name in CONFIGS for preset in (None, "exact") for checkpointing in (0, 1)]


def changes(trace: Trace) -> list[int]:
    return [trace.change(at) for at in range(len(trace.events))]


@pytest.mark.daily(4)
@pytest.mark.parametrize(("name", "preset", "checkpointing"), CASES)
@pytest.mark.parametrize("lora", [None, 8])
def test_the_trace_of_a_few_layers_becomes_that_of_all(name, preset, checkpointing, lora):
    several = Estimates(CONFIGS[name], dtype="bf16", lora=lora)
    setting = several._case(2, 128, preset)
    found = several._step(setting, bool(checkpointing), roles=True)
    trace = trace_of(found, BLOCK)
    assert trace is not None and found.more
    step = run_step(several._model(bool(checkpointing)), setting, roles=False)
    whole = trace_of(Extrapolated(step, 0, False, base=step), BLOCK)
    assert whole is not None and trace.peak == whole.peak == step.peak
    # every allocation and free agrees, except for tensors that the first forward of an adapter makes to inspect it
    if lora is None:
        assert changes(trace) == changes(whole)
    trained = [p for p in several._model(False).parameters() if p.requires_grad]
    assert abs(len(trace.gradients) - len(trained)) <= 1


def test_a_gradient_lives_to_the_end_of_the_step():
    trace = Trace([4 * MIB, -1, 8 * MIB], frozenset([0]))
    allocator = CachingAllocator()
    replay(allocator, Held([MIB], [2 * MIB], [16 * MIB]), [trace])
    # weight, gradient, states and temporary tensors
    assert allocator.most_allocated == (1 + 4 + 2 + 16) * MIB
    assert allocator.allocated == (1 + 2) * MIB


def test_batches_of_different_lengths_reserve_more():
    def step(scale: int) -> Trace:
        sizes = [scale * MIB * part for part in (20, 30, 50)]
        return Trace([*sizes, *(-at for at in (3, 2, 1))])

    held = Held([100 * MIB])
    equal = reserved_share(held, [step(4)] * 3, expandable=False)
    different = [step(scale) for scale in (2, 3, 4)]
    assert equal == 1.0 < reserved_share(held, different, expandable=False)
    assert reserved_share(held, different, expandable=True) < reserved_share(held, different, expandable=False)


def test_an_estimate_says_what_is_reserved():
    found = estimate(CONFIGS["llama"], batch_size=8, seq_len=256, config=None, dtype="bf16")
    assert found.reserved_share is not None and found.reserved_share_expandable is not None
    assert 1 < found.reserved_share < 1.5 and 1 < found.reserved_share_expandable < 1.5
    assert f"reserves {found.reserved_share:.2f} bytes for each byte" in str(found) and "different lengths" in str(
        found
    )
    assert found.reserved_bytes(2.0) == 2 * found.total_peak_bytes + found.context_bytes


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"processes": 2}, {"fsdp": 2}])
def test_without_a_replay_nothing_is_said(options):
    found = estimate(CONFIGS["llama"], batch_size=1, seq_len=64, config=None, dtype="bf16", **options)
    assert found.reserved_share is None and "reserves" not in str(found)
