"""How model code sees the attention of a patched layer: it reads the stock name, and the current values of globals."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
from transformers import AttentionInterface, LlamaConfig
from transformers.models.llama import modeling_llama

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.modules.attention import ATTENTION_NAME, EAGER_NAME, OURS
from tests.families import BODY, BY_NAME, differing, step

LLAMA = BY_NAME["llama"]
CONFIGS = {"sdpa": BODY, "eager": CompressionConfig(attention_variant="tempo", loss_head=False)}


def view(name: str) -> tuple[Any, Any]:
    """The config as a patched attention module sees it, and the model's own."""
    model = LLAMA.build(attn_implementation=name)
    patch_model(model, CONFIGS[name])
    return model.model.layers[0].self_attn.config, model.config


@pytest.mark.parametrize("name", OURS)
def test_the_name_compares_as_the_stock_name(name: str) -> None:
    seen = view(name)[0]._attn_implementation
    other = "sdpa" if name == "eager" else "eager"
    assert seen in ("eager", "sdpa") and seen == name and name == seen and seen != other
    assert (seen != name) is False
    assert "flash" not in seen and f"{seen}" == name and str(seen) == name and seen.startswith(name)


@pytest.mark.parametrize("name", OURS)
def test_the_interface_finds_our_function_by_it(name: str) -> None:
    registered = AttentionInterface._global_mapping[{"sdpa": ATTENTION_NAME, "eager": EAGER_NAME}[name]]
    seen = view(name)[0]._attn_implementation
    assert modeling_llama.ALL_ATTENTION_FUNCTIONS.get_interface(seen, None) is registered


def test_the_view_passes_for_the_config() -> None:
    seen, config = view("sdpa")
    assert isinstance(seen, LlamaConfig) and seen.hidden_size == config.hidden_size
    for copied in (copy.copy(seen), copy.deepcopy(seen), pickle.loads(pickle.dumps(seen))):
        assert type(copied) is LlamaConfig and copied.to_dict() == config.to_dict()
    config._attn_implementation = "eager"
    assert seen._attn_implementation == "eager" and seen._attn_implementation != "sdpa"


@pytest.mark.parametrize("kind", ["DeepseekV32", "GlmMoeDsa"])
def test_the_sparse_mask_of_an_indexer_is_there(kind: str) -> None:
    """Its attention asks for the name to decide whether it builds the mask."""
    config = getattr(transformers, f"{kind}Config", None)
    if config is None:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    torch.manual_seed(0)
    options = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8,
        "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "index_topk": 4,
        "index_head_dim": 16, "index_n_heads": 2, "head_dim": 8, "mlp_layer_types": ["dense", "sparse"],
    }  # fmt: skip
    stock = getattr(transformers, f"{kind}ForCausalLM")(config(**options)).train()
    ours = patch_model(copy.deepcopy(stock))
    ids = torch.randint(0, 64, (2, 16))
    with torch.no_grad():
        assert torch.equal(ours.eval()(input_ids=ids).logits, stock.eval()(input_ids=ids).logits)
    batch = {"input_ids": ids, "labels": ids}
    loss, grads = step(ours.train(), batch)
    expected_loss, expected = step(stock.train(), batch)
    assert torch.equal(loss, expected_loss) and grads.keys() == expected.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6)


def test_an_exchanged_global_is_seen_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of the forward that finds our rotary embeddings reads the other globals of the file as they are now."""
    model, stock = patch_model(LLAMA.build(), BODY), LLAMA.build()
    step(model, LLAMA.make_batch())
    for m in (model, stock):
        m.config._attn_implementation = "eager"
    own = modeling_llama.eager_attention_forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        out, weights = own(*args, **kwargs)
        return 2.0 * out, weights

    before = step(model, LLAMA.make_batch())[0]
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", doubled)
    loss, grads = step(model, LLAMA.make_batch())
    expected_loss, expected = step(stock, LLAMA.make_batch())
    assert torch.equal(loss, expected_loss) and not torch.equal(loss, before)
    assert grads.keys() == expected.keys() and len(differing(grads, expected)) < len(grads)


@pytest.mark.parametrize("padding", ["none", "right", "left"])
def test_values_of_another_width_than_keys(padding: str) -> None:
    """Multi-head latent attention has such values. With a mask, torch chooses another kernel than for equal widths."""
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=67, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=2, kv_lora_rank=8, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=12, head_dim=8, pad_token_id=0,
    )  # fmt: skip
    stock = transformers.DeepseekV3ForCausalLM(config).train()
    ours = patch_model(copy.deepcopy(stock), BODY)
    batch = LLAMA.make_batch(padding)
    loss, grads = step(ours, batch)
    expected_loss, expected = step(stock, batch)
    assert torch.equal(loss, expected_loss)
    for name in expected:
        torch.testing.assert_close(grads[name], expected[name], rtol=1e-4, atol=1e-6)
