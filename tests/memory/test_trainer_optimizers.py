"""The states that optimizers keep under transformers' Trainer, by the byte."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers.training_args import OptimizerNames

from hf_actcompress import estimate
from hf_actcompress.errors import UnknownOptionError
from hf_actcompress.memory.estimation.states.optimizers import optimizer_rule

LLAMA: dict[str, Any] = {
    "vocab_size": 500, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 256, "use_cache": False,
}  # fmt: skip
ADAMW = ("adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit")
OTHERS = (
    "adagrad", "rmsprop", "rmsprop_bnb", "rmsprop_bnb_8bit", "lion_32bit", "paged_lion_8bit", "ademamix",
    "paged_ademamix_8bit",
)  # fmt: skip
MODELS: dict[str, Any] = {
    "Llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)),
    "Llama, tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "GPT-2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=500, n_embd=128, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1)
    ),
}


def states_of(model: Any, optim: str, folder: Path) -> int:
    """Bytes of the states after one step of the Trainer, without the codes' values, which all weights share."""
    import bitsandbytes as bnb

    # it remembers weights of earlier trainings by their `id`, which new ones may get again
    bnb.optim.GlobalOptimManager.get_instance().initialize()
    options: dict[str, Any] = {"max_steps": 1, "per_device_train_batch_size": 2, "report_to": [], "save_strategy": "no"}
    ids = torch.randint(3, 500, (16,))
    arguments = hf.TrainingArguments(str(folder), optim=optim, use_cpu=True, disable_tqdm=True, **options)
    trainer = hf.Trainer(model=model, args=arguments, train_dataset=[{"input_ids": ids, "labels": ids}] * 2)
    trainer.train()
    optimizer: Any = trainer.optimizer
    states = getattr(optimizer, "optimizer", optimizer).state.values()
    named = (pair for state in states for pair in state.items())
    return sum(x.nbytes for name, x in named if isinstance(x, torch.Tensor) and not name.startswith("qmap"))


@pytest.mark.parametrize(("name", "optim"), [*product(MODELS, ADAMW), *(("Llama, tied", optim) for optim in OTHERS)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_states_under_the_trainer(name: str, dtype: torch.dtype, optim: str, tmp_path: Path) -> None:
    """Moments of 8 bits but for embeddings and small tensors; those of 32 bits are fp32 whatever the weights are.

    Optimizers of torch keep the weights' dtype.
    """
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    model = MODELS[name]().to(dtype)
    found = estimate(model, batch_size=2, seq_len=16, optimizer=optim, device="cpu")
    assert found.optimizer_bytes == states_of(model, optim, tmp_path)


def test_each_name_of_the_trainer_has_a_price_or_an_error_that_says_so() -> None:
    unpriced = []
    for known in OptimizerNames:
        try:
            optimizer_rule(known.value)
        except UnknownOptionError as error:
            assert "number of bytes of the Trainer's optimizer" in str(error)
            unpriced.append(known.value)
    assert len(unpriced) < len(OptimizerNames) / 2
    with pytest.raises(UnknownOptionError, match="unknown optimizer 'adam'"):
        optimizer_rule("adam")


def test_names_without_bits_mean_32() -> None:
    """apex keeps fp32 moments, too."""
    for name in ("paged_adamw", "paged_adamw_32bit", "adamw_apex_fused"):
        assert optimizer_rule(name) is optimizer_rule("adamw_32bit")
