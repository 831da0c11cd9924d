"""Quantised weights under a patched model: bitsandbytes' 4- and 8-bit layers and torchao's tensor subclasses."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_actcompress import CompressionConfig, kept_bytes, patch_model, unpatch_model
from tests.families import BODY, VOCAB, Batch, differing, relative_error, step
from tests.layers.plans import assert_compiled, calls, plans_of

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")

# sums in another order than stock's differ by some 1e-7 in fp32
TOLERANCE = 1e-5
TARGETS = ["q_proj", "v_proj", "gate_proj", "down_proj"]


def _config() -> Any:
    # blocks of 64 numbers are quantised together
    return transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False, pad_token_id=0,
    )  # fmt: skip


def _batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (3, 13), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _lora(model: Any, rank: int = 4) -> Any:
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=rank, target_modules=TARGETS, init_lora_weights=False)
    return peft.get_peft_model(model, config).train()


def _assert_same_step(ours: Any, stock: Any, dtype: torch.dtype) -> None:
    """Gradients are bit-equal in bf16. In fp32 they are close: an RMSNorm returns one gradient where stock adds two."""
    (loss, grads), (expected_loss, expected) = step(ours, _batch()), step(stock, _batch())
    assert expected and any(float(g.abs().sum()) > 0 for g in expected.values())
    if dtype == torch.bfloat16:
        assert torch.equal(loss, expected_loss) and not differing(grads, expected)
        return
    assert grads.keys() == expected.keys()
    assert torch.allclose(loss, expected_loss, rtol=TOLERANCE)
    assert relative_error(grads, expected) < TOLERANCE


# bitsandbytes


@cache
def _bitsandbytes() -> Any:
    """The module, or a skip with the reason why its layers do not run here."""
    bnb = pytest.importorskip("bitsandbytes")
    try:
        layers = [bnb.nn.Linear4bit(64, 64, quant_type="nf4"), bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False)]
        for layer in layers:
            layer.to("cpu")(torch.randn(2, 64, requires_grad=True)).sum().backward()
    except Exception as error:
        pytest.skip(f"bitsandbytes does not run here: {type(error).__name__}: {error}")
    return bnb


def _quantisation(bits: int, dtype: torch.dtype) -> Any:
    if bits == 8:
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def _loaded(folder: Path, bits: int, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(_config()).save_pretrained(folder)
    return transformers.LlamaForCausalLM.from_pretrained(
        folder, quantization_config=_quantisation(bits, dtype), dtype=dtype, device_map="cpu"
    )


bits_and_dtypes = pytest.mark.parametrize(
    ("bits", "dtype"), [(4, torch.bfloat16), (4, torch.float32), (8, torch.bfloat16), (8, torch.float32)], ids=str
)
orders = pytest.mark.parametrize("order", ["patch, lora", "lora, patch"])


@bits_and_dtypes
@orders
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_bitsandbytes_with_lora(bits: int, dtype: torch.dtype, order: str, checkpointing: bool, tmp_path: Path) -> None:
    bnb = _bitsandbytes()
    models = []
    for patched in (False, True):
        model = _loaded(tmp_path, bits, dtype)
        assert any(isinstance(m, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)) for m in model.modules())
        # this casts the norms to fp32 and makes the embedding's output require a gradient; QLoRA recipes call it
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpointing)
        if patched and order == "patch, lora":
            patch_model(model, BODY)
        model = _lora(model)
        models.append(patch_model(model, BODY) if patched and order == "lora, patch" else model)
    stock, ours = models
    # the norms are in fp32, and so are the hidden states between the layers
    _assert_same_step(ours, stock, torch.float32)
    assert [type(m) for m in unpatch_model(ours).modules()] == [type(m) for m in stock.modules()]


@bits_and_dtypes
def test_bitsandbytes_as_loaded(bits: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Without PEFT's preparation everything stays in one dtype, and the gradients have the same bits in bf16."""
    _bitsandbytes()
    stock = _lora(_loaded(tmp_path, bits, dtype))
    ours = patch_model(_lora(_loaded(tmp_path, bits, dtype)), BODY)
    _assert_same_step(ours, stock, dtype)


@bits_and_dtypes
@pytest.mark.parametrize(("checkpointing", "rank"), [(False, 4), (False, 16), (True, 4)])
def test_bitsandbytes_runs_by_plans(
    bits: int, dtype: torch.dtype, checkpointing: bool, rank: int, tmp_path: Path
) -> None:
    """A quantised layer is one node of its layer's graph. What is kept is what modules keep, or less.

    An adapter's second product of 16 features is not cheap to recompute, so the sum with the base layer's is kept.
    """
    _bitsandbytes()
    results, kept = [], []
    for plans in (None, False, True):
        model = _loaded(tmp_path, bits, dtype)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        model = _lora(model, rank)
        if plans is not None:
            patch_model(model, CompressionConfig(loss_head=False, plans=plans))
        results.append(step(model, _batch()))
        kept.append(kept_bytes(lambda model=model: model(**_batch()).loss, "cpu"))  # type: ignore[misc]
    stock, _, ours = results
    assert torch.equal(stock[0], ours[0]) and not differing(ours[1], stock[1])
    assert calls(model) == [2, 2] and not any(found.leaf_calls for found in plans_of(model))
    assert kept[2] <= 1.01 * kept[1] and kept[2] < kept[0]


@pytest.mark.daily(2)
def test_bitsandbytes_between_compiled_segments(tmp_path: Path) -> None:
    """Inductor compiles what lies between quantised layers; the same bytes are kept."""
    _bitsandbytes()
    results, kept = [], []
    for compile in (False, True):
        model = patch_model(_lora(_loaded(tmp_path, 4, torch.float32)), BODY, compile=compile)
        results.append(step(model, _batch()))
        kept.append(kept_bytes(lambda model=model: model(**_batch()).loss, "cpu"))  # type: ignore[misc]
    assert_compiled(model)
    assert relative_error(results[1][1], results[0][1]) < TOLERANCE
    assert kept[0] == kept[1]


@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes_without_padding(bits: int, tmp_path: Path) -> None:
    _bitsandbytes()
    results = []
    for drop in (False, True):
        model = patch_model(_lora(_loaded(tmp_path, bits, torch.float32)), CompressionConfig(drop_padding=drop))
        results.append(step(model, _batch()))
        assert calls(model) == [1, 1]
    assert torch.equal(results[0][0], results[1][0])
    assert relative_error(results[1][1], results[0][1]) < TOLERANCE


def test_bitsandbytes_layers_that_change_before_the_backward(tmp_path: Path) -> None:
    """A checkpointed layer runs quantised layers again as they were in the forward."""
    bnb, grads = _bitsandbytes(), []
    for change in (False, True):
        model = _loaded(tmp_path, 4, torch.float32)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
        model = patch_model(_lora(model))
        loss = model(**_batch()).loss
        if change:
            for module in model.modules():
                if isinstance(module, bnb.nn.Linear4bit):
                    module.weight = nn.Parameter(torch.zeros(1), requires_grad=False)
            model.eval()
        loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert not differing(*grads)


# torchao: the weight of a plain nn.Linear becomes a tensor subclass


def _weight_only() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig()


def _dynamic() -> Any:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    return Int8DynamicActivationInt8WeightConfig()


def _int8_training() -> Any:
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training

    return int8_weight_only_quantized_training()


def _int8_mixed_training() -> Any:
    from torchao.prototype.quantized_training import int8_mixed_precision_training

    return int8_mixed_precision_training()


def _bitnet_training() -> Any:
    from torchao.prototype.quantized_training import bitnet_training

    return bitnet_training()


Quantise = Callable[[], Any]


def _torchao(model: Any, quantise: Quantise) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(2)

    def is_inner(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and "lm_head" not in name and "lora" not in name

    quantization.quantize_(model, quantise(), filter_fn=is_inner)
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    assert any(type(w) not in (torch.Tensor, nn.Parameter) for w in weights)
    return model


def _llama(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(_config()).to(dtype).train()


dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


@dtypes
@pytest.mark.parametrize("quantise", [_weight_only, _dynamic])
@pytest.mark.parametrize("order", ["quantise, patch, lora", "quantise, lora, patch", "patch, quantise, lora"])
def test_torchao_with_lora(quantise: Quantise, order: str, dtype: torch.dtype) -> None:
    steps: dict[str, Callable[[Any], Any]] = {
        "patch": lambda model: patch_model(model, BODY),
        "lora": _lora,
        "quantise": lambda model: _torchao(model, quantise),
    }
    stock = _lora(_torchao(_llama(dtype), quantise))
    ours = _llama(dtype)
    for name in order.split(", "):
        ours = steps[name](ours)
    _assert_same_step(ours, stock, dtype)


@dtypes
@pytest.mark.parametrize("quantise", [_int8_training, _int8_mixed_training, _bitnet_training])
@pytest.mark.parametrize("order", ["quantise, patch", "patch, quantise"])
def test_torchao_quantised_training(quantise: Quantise, order: str, dtype: torch.dtype) -> None:
    """The quantised weights are trained. Some methods round stochastically, so both sides start from the same seed."""
    stock = _torchao(_llama(dtype), quantise)
    if order == "quantise, patch":
        ours = patch_model(_torchao(_llama(dtype), quantise), BODY)
    else:
        ours = _torchao(patch_model(_llama(dtype), BODY), quantise)
    _assert_same_step(ours, stock, dtype)
