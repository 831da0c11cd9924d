"""`python -m tests.sweep.experts_lora`: what LoRA of PEFT's `target_parameters` keeps on the experts of mixtures.

Eight types of models with tiny random weights, in each implementation of their experts: grouped products, batched ones,
and a loop over experts.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import peft
import torch
import transformers as hf

from hf_actcompress import kept_bytes, patch_model
from tests.families import Gradients, oracle_step, relative_error, step

from .step import difference, jittered, roughened
from .table import HERE

ROWS, TOKENS, WIDTH, FFN, EXPERTS, RANK = 2, 64, 64, 64, 8, 4
SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": WIDTH, "intermediate_size": FFN, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "use_cache": False,
}  # fmt: skip
LOCAL, NAMED = {"num_local_experts": EXPERTS}, {"num_experts": EXPERTS}
OF_DEEPSEEK = {
    "n_routed_experts": EXPERTS, "moe_intermediate_size": FFN, "n_group": 2, "topk_group": 1, "q_lora_rank": 32,
    "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 0,
}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "Qwen3-MoE": lambda: hf.Qwen3MoeConfig(**SIZES, **NAMED, moe_intermediate_size=FFN, head_dim=16),
    "Mixtral": lambda: hf.MixtralConfig(**SIZES, **LOCAL),
    "gpt-oss": lambda: hf.GptOssConfig(**SIZES, **LOCAL, head_dim=16),
    "Qwen2-MoE": lambda: hf.Qwen2MoeConfig(
        **SIZES, **NAMED, moe_intermediate_size=FFN, shared_expert_intermediate_size=FFN
    ),
    "OLMoE": lambda: hf.OlmoeConfig(**SIZES, **NAMED),
    "Granite-MoE": lambda: hf.GraniteMoeConfig(**SIZES, **LOCAL),
    "Phi-MoE": lambda: hf.PhimoeConfig(**SIZES, **LOCAL),
    "DeepSeek-V3": lambda: hf.DeepseekV3Config(**SIZES, **OF_DEEPSEEK),
}
IMPLEMENTATIONS = ["grouped_mm", "batched_mm", "eager"]
# of the weights of all experts, in fp32
WEIGHTS = SIZES["num_hidden_layers"] * EXPERTS * 3 * WIDTH * FFN * 4
TRIALS = 4


def batch() -> dict[str, Any]:
    """Random tokens, all of which are labels."""
    ids = torch.randint(3, 99, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def build(name: str, implementation: str) -> Any:
    """The model in train mode, frozen but for LoRA on its attention and experts. Always the same weights."""
    torch.manual_seed(0)
    model: Any = roughened(hf.AutoModelForCausalLM.from_config(MODELS[name]()))
    model.set_experts_implementation(implementation)
    lora = peft.LoraConfig(
        r=RANK,
        target_modules=r".*self_attn\.(q_proj|q_b_proj|o_proj)",
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        init_lora_weights=False,
    )
    return peft.get_peft_model(model, lora).train()


@dataclass
class Run:
    """The gradients of a step, and what a batch keeps."""

    gradients: Gradients
    kept: int


def run(name: str, implementation: str, preset: str | None) -> Run:
    """One step of the stock model, or of a patched one."""
    model = build(name, implementation)
    if preset is not None:
        patch_model(model, preset)
    _, gradients = step(model, batch())
    return Run(gradients, kept_bytes(lambda: model(**batch()).loss, "cpu"))


def errors(name: str, implementation: str) -> tuple[float, float]:
    """Stock's error and exact's against fp64: the root of the mean square over some models with other weights."""
    squares = torch.zeros(2, dtype=torch.float64)
    for trial in range(TRIALS):
        model = jittered(build(name, implementation), trial)
        looped = copy.deepcopy(model)
        # grouped products have no kernel for fp64
        looped.get_base_model().set_experts_implementation("eager")
        true, found = oracle_step(looped, batch()), step(model, batch())[1]
        ours = step(patch_model(model), batch())[1]
        squares += torch.tensor([relative_error(gradients, true) ** 2 for gradients in (found, ours)])
    stock, exact = (squares / TRIALS).sqrt().tolist()
    return stock, exact


def row(name: str, implementation: str) -> list[str]:
    """The cells of a row of the table."""
    stock, exact, int8 = (run(name, implementation, preset) for preset in (None, "exact", "int8"))
    cells = [name, implementation, f"{stock.kept / 1024:,.0f}"]
    cells += [f"{found.kept / stock.kept:.1%}" for found in (exact, int8)]
    figures = [difference(exact.gradients, stock.gradients), *errors(name, implementation)]
    return [*cells, *(f"{x:.1e}" if x else "0" for x in figures)]


VERSIONS = f"torch {torch.__version__}, transformers {hf.__version__}, peft {peft.__version__}"
INTRODUCTION = f"""# Mixtures of experts: LoRA on the weights of all experts

`python -m tests.sweep.experts_lora`, {VERSIONS}, fp32, train mode,
{ROWS} x {TOKENS} tokens. LoRA of rank {RANK} is on the attention and, by PEFT's `target_parameters`, on the experts;
all else is frozen. For each call PEFT makes the weights of all experts with what the adapters add, here
{WEIGHTS // 1024:,} KiB. Stock keeps them; batched experts keep them once for each pair of token and expert.

Shares are of what stock keeps. Then the relative error of all gradients against stock's (0: the same bits), and against
fp64, this over {TRIALS} models with weights that differ by some percent. The router of Phi-MoE draws random numbers in
training, and in fp64 it draws others.

"""
HEAD = ["model", "experts", "stock, KiB", "exact", "int8", "exact against stock", "stock against fp64"]
HEAD += ["exact against fp64"]


def main() -> int:
    """Write `experts_lora.md`."""
    argparse.ArgumentParser(prog="python -m tests.sweep.experts_lora", description=__doc__).parse_args()
    hf.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    # products are so small that threads would only wait for each other
    torch.set_num_threads(1)
    rows = [row(name, implementation) for name in MODELS for implementation in IMPLEMENTATIONS]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in (HEAD, ["---"] * len(HEAD), *rows))
    (HERE / "experts_lora.md").write_text(INTRODUCTION + table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
