"""The rules of a CUDA device, compared with bytes that torch's own CUDA formulas give on fake CUDA tensors.

The figures are bytes per token and layer for 2 x 512 tokens, with dropout at its default. A program outside of this
project ran autograd's CUDA code without data, and counted the same bytes with two versions of torch and transformers.
"""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.nn import functional

from hf_actcompress.memory import estimate
from hf_actcompress.memory.estimation.fake_step.cuda_rules import CudaRules
from hf_actcompress.memory.estimation.fake_step.fake_allocator import FakeAllocator
from hf_actcompress.memory.estimation.fake_step.fake_kernels import KernelResults
from hf_actcompress.memory.estimation.fake_step.stand_ins import StepRules
from hf_actcompress.memory.estimation.fake_step.workspaces import CUDA_WORKSPACES
from hf_actcompress.private_apis import FakeTensorMode
from hf_actcompress.quick.sizes import readable_size
from hf_actcompress.reference.device_rules import device_rules, under_rules
from hf_actcompress.reference.logits_chunks import MIN_DEVICE_CHUNK

aten = torch.ops.aten
BATCH, LENGTH = 2, 512
BERT = hf.BertConfig(num_hidden_layers=6, architectures=["BertForMaskedLM"])
GPT2 = hf.GPT2Config(n_layer=6)
LLAMA = hf.LlamaConfig(
    hidden_size=2048, intermediate_size=5632, num_hidden_layers=6, num_attention_heads=32, num_key_value_heads=4,
)  # fmt: skip

FIGURES = [
    (BERT, {"dtype": "bfloat16"}, 26176),
    (BERT, {"dtype": "float32"}, 50752),
    (BERT, {"dtype": "float32", "autocast": "bfloat16"}, 46144),
    (GPT2, {"dtype": "bfloat16"}, 44608),
    (LLAMA, {"dtype": "bfloat16"}, 87176),
    # in fp32, grouped heads take the math path, which keeps the probabilities
    (LLAMA, {"dtype": "float32"}, 237576),
    (LLAMA, {"dtype": "bfloat16", "lora": 16}, 128.57 * 2**20 / (BATCH * LENGTH)),
    (BERT, {"dtype": "bfloat16", "gradient_checkpointing": True}, 2 * 768),
]


@pytest.mark.parametrize(("config", "options", "figure"), FIGURES)
def test_stock_keeps_what_a_device_keeps(config, options, figure):
    found = estimate(config, batch_size=BATCH, seq_len=LENGTH, config="stock", **options)
    # each call of a fused op keeps a generator's state in a block of 512 bytes, which does not grow with the tokens
    assert found.kept_per_layer / (BATCH * LENGTH) == pytest.approx(figure, rel=2e-4)


@pytest.mark.parametrize(
    ("config", "figure"),
    # a layer keeps norm inputs, q, k, v and attention's output, MLP pre-activations, and statistics; for Llama this is
    # 4 + 4 + 2 x 0.25 + 4 x 2.75 h
    [(BERT, 20.09), (LLAMA, 19.5)],
)
def test_patched_models_keep_the_floor_on_a_device(config, figure):
    found = estimate(config, batch_size=BATCH, seq_len=LENGTH, dtype="bfloat16")
    assert found.kept_per_layer / (BATCH * LENGTH * config.hidden_size) == pytest.approx(figure, abs=0.1)


def test_a_chunk_of_logits_is_counted_beside_the_gradients_of_the_head():
    tokens, hidden, vocab = 1024, 512, 32_000
    allocator = FakeAllocator()
    with FakeTensorMode(), under_rules(StepRules(allocator, KernelResults())), allocator:
        h, weight = (torch.empty(rows, hidden, dtype=torch.bfloat16) for rows in (tokens, vocab))
        target, row = torch.empty(tokens, dtype=torch.int64), torch.empty(tokens)
        backward = device_rules().function("linear_cross_entropy_bwd")
        # the first result is computed, and the second one is remembered
        for _ in range(2):
            allocator.forget()
            grads = backward(row, h, weight, None, target, row, row, (), (True, True, False))
            # held are the gradients of h, in fp32, and of the weight. At the peak there are also a chunk of logits and
            # the chunk's own product; the hidden states have fewer elements than the smallest chunk
            kept = 4 * tokens * hidden + 2 * vocab * hidden
            assert allocator.live_bytes == kept
            assert allocator.peak_bytes == kept + 2 * MIN_DEVICE_CHUNK + 2 * (MIN_DEVICE_CHUNK // tokens) * hidden
            del grads


@pytest.mark.parametrize("key_heads", [8, 2])
@pytest.mark.parametrize("features", [80, 160])
def test_flash_attention_adds_up_in_fp32_and_by_heads_in_its_backward(key_heads, features):
    heads, rows = 8, 200
    allocator = FakeAllocator(1, CUDA_WORKSPACES)
    with FakeTensorMode(), allocator:
        q, out, dout = (torch.empty(2, heads, rows, features, dtype=torch.bfloat16) for _ in range(3))
        k, v = (torch.empty(2, key_heads, rows, features, dtype=torch.bfloat16) for _ in range(2))
        lse, seed = torch.empty(2, heads, rows), torch.empty(2, dtype=torch.int64)
        allocator.forget()
        grads = aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, None, None, rows, rows, 0.0, True, seed, seed, scale=None
        )
    assert allocator.live_bytes == q.nbytes + 2 * k.nbytes == sum(x.nbytes for x in grads)
    # in memory, 200 rows are padded to 256, 80 features to 96, and 160 features to 192
    in_fp32 = 4 * 2 * heads * 256 * (1 + (96 if features == 80 else 192))
    by_heads = 2 * q.nbytes if key_heads < heads else 0
    assert allocator.peak_bytes == allocator.live_bytes + in_fp32 + by_heads


def test_flash_attention_of_sequences_in_one_row():
    allocator = FakeAllocator(1, CUDA_WORKSPACES)
    with FakeTensorMode(), allocator:
        q, out, dout = (torch.empty(300, 8, 64, dtype=torch.bfloat16) for _ in range(3))
        k, v = (torch.empty(300, 4, 64, dtype=torch.bfloat16) for _ in range(2))
        lse, seed, bounds = torch.empty(8, 300), torch.empty(2, dtype=torch.int64), torch.empty(4, dtype=torch.int32)
        allocator.forget()
        grads = aten._flash_attention_backward(
            dout, q, k, v, out, lse, bounds, bounds, 200, 200, 0.0, True, seed, seed, scale=None
        )
    assert allocator.live_bytes == sum(x.nbytes for x in grads)
    # 128 rows more for each of three sequences
    assert allocator.peak_bytes == allocator.live_bytes + 4 * 8 * (300 + 3 * 128) * (1 + 64) + 2 * q.nbytes


@pytest.mark.parametrize(
    ("dtype", "features", "tiles", "tile", "splits"),
    [
        (torch.float32, 64, 4, 64 * 64, 0),
        (torch.float32, 80, 2 * 2, 128 * 64, 0),
        (torch.bfloat16, 32, 4, 64 * 64, 0),
        (torch.bfloat16, 128, 2, 128 * 128, 0),
        (torch.bfloat16, 256, 2 * 4, 128 * 64, 4),
    ],
)
def test_the_memory_efficient_kernel_adds_up_in_tiles(dtype, features, tiles, tile, splits):
    heads, rows = 8, 200
    allocator = FakeAllocator(1, CUDA_WORKSPACES)
    with FakeTensorMode(), allocator:
        q, k, v, out, dout = (torch.empty(2, heads, rows, features, dtype=dtype) for _ in range(5))
        lse, seed = torch.empty(2, heads, rows), torch.empty(2, dtype=torch.int64)
        allocator.forget()
        grads = aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, None, out, lse, seed, seed, 0.0, [True, True, True, False], True
        )
    assert allocator.live_bytes == sum(x.nbytes for x in grads if x is not None) == 3 * q.nbytes
    sums, dq, dk_dv = 4 * 2 * heads * rows, 2 * heads * tiles * (16 + 4 * tile), 2 * 4 * 2 * heads * splits * 64 * 256
    assert allocator.peak_bytes == allocator.live_bytes + sums + dq + dk_dv


def test_what_is_offloaded_is_not_on_the_device():
    options = {"batch_size": BATCH, "seq_len": LENGTH, "dtype": "bfloat16"}
    exact, offload = (estimate(LLAMA, config=config, **options) for config in ("exact", "offload"))
    assert offload.kept_bytes < exact.kept_bytes / 100
    assert sum(offload.kept_by_role.values()) == offload.kept_bytes


def test_sizes_are_whole_blocks():
    found = estimate(BERT, batch_size=1, seq_len=5)
    for size in (found.weights_bytes, found.gradients_bytes, found.kept_bytes, found.step_peak_bytes):
        assert size % 512 == 0


def saved(call) -> list[tuple[tuple[int, ...], torch.dtype]]:
    found: list[tuple[tuple[int, ...], torch.dtype]] = []

    def pack(x: Tensor) -> Tensor:
        found.append((tuple(x.shape), x.dtype))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), CudaRules():
        call()
    return found


def test_the_values_are_those_of_the_stock_dropout_and_its_mask_one_byte():
    x = torch.randn(64, 64, requires_grad=True)
    assert saved(lambda: functional.dropout(x, 0.5, training=True)) == [((64, 64), torch.bool)]
    with CudaRules():
        assert functional.dropout(x, 0.5, training=False) is x


def test_a_mask_that_is_an_expanded_column_leaves_attention_to_probabilities():
    q = torch.empty(1, 2, 8, 4, dtype=torch.bfloat16, device="meta", requires_grad=True)
    column = torch.empty(1, 1, 8, 1, dtype=torch.bool, device="meta")

    def attend(mask):
        return saved(lambda: functional.scaled_dot_product_attention(q, q, q, mask))

    probabilities = ((2, 8, 8), torch.float32)
    assert probabilities in attend(column.expand(1, 1, 8, 8))
    assert probabilities not in attend(column.expand(1, 1, 8, 8).contiguous())


def test_autocast_casts_log_probabilities_and_not_logits():
    # BERT's loss reads logits in 16 bits; log-probabilities are kept in 16 bits and, for nll_loss, in fp32
    x, target = torch.zeros(8, 5, dtype=torch.bfloat16, requires_grad=True), torch.zeros(8, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):
        kept = saved(lambda: functional.cross_entropy(x, target))
        others = (
            saved(lambda: functional.cross_entropy(x, target, label_smoothing=0.1)),
            saved(lambda: functional.cross_entropy(x, x.detach().softmax(1))),
        )
    assert kept[:2] == [((8, 5), torch.bfloat16), ((8, 5), torch.float32)]
    assert all(((8, 5), torch.bfloat16) not in each for each in others)


def test_autocast_comes_before_the_choice_of_the_attention_kernel():
    # rotary embeddings return fp32, which autocast casts to bf16: flash attention runs, and keeps no probabilities
    options = {"batch_size": BATCH, "seq_len": LENGTH, "config": "exact"}
    mixed, half = (
        estimate(LLAMA, dtype="float32", autocast="bfloat16", **options),
        estimate(LLAMA, dtype="bfloat16", **options),
    )
    # the angles are in fp32
    assert mixed.kept_by_role["attention"] == pytest.approx(half.kept_by_role["attention"], rel=0.01)


def test_a_mask_that_a_model_makes_itself_is_skipped_where_it_hides_nothing():
    config = hf.BartConfig(
        encoder_layers=2, decoder_layers=2, architectures=["BartForConditionalGeneration"], use_cache=False
    )
    short, long = (
        estimate(config, batch_size=1, seq_len=size, config="stock", dtype="bfloat16") for size in (512, 1024)
    )
    # a mask of the decoder would grow with the square of the tokens
    assert long.kept_bytes < 2.01 * short.kept_bytes


def test_the_peak_that_an_estimate_prints_is_what_the_card_must_have() -> None:
    """As in the table of the command, its JSON and the page; on a CPU there is no context."""
    found, on_cpu = (estimate(LLAMA, batch_size=1, seq_len=64, device=device) for device in ("cuda", "cpu"))
    whole, context = readable_size(found.device_bytes), readable_size(found.context_bytes)
    assert f"peak {whole} with {context} for the device's context" in str(found)
    assert found.tables()[0].total[1] == whole and found.device_bytes > found.total_peak_bytes
    assert f"peak {readable_size(on_cpu.total_peak_bytes)}, kept" in str(on_cpu)


@pytest.mark.parametrize("key_heads", [2, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_long_keeps_less_than_exact(dtype: str, key_heads: int) -> None:
    """A device has no fused kernel for fewer heads of keys in fp32: stock keeps the probabilities, no preset does."""
    config = hf.LlamaConfig(
        hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=key_heads, vocab_size=100, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    kept = {
        way: estimate(config, batch_size=1, seq_len=512, config=way, dtype=dtype).kept_by_role
        for way in ("exact", "long")
    }
    assert sum(kept["long"].values()) < 0.9 * sum(kept["exact"].values())
    assert kept["long"]["attention"] == kept["exact"]["attention"] < 2 * 4 * 512 * 512
