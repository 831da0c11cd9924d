"""The table of PEFT methods: each method of the installed PEFT, and each option of it that runs other code.

Sizes are small enough for the hidden size 32 of the models.
"""

from __future__ import annotations

import torch
from peft.tuners.lora import config as lora_configs

from . import method as m
from .method import Method, lora, on, prompt

_TASKS = {"task_ids": torch.tensor([0, 1, 0])}
_CPT = {
    "cpt_token_ids": [3, 4, 5, 6], "cpt_mask": [1, 1, 1, 1], "cpt_tokens_type_mask": [1, 2, 3, 4],
    "num_virtual_tokens": 4,
}  # fmt: skip
_ADALORA = {"init_r": 6, "target_r": 3, "tinit": 1, "tfinal": 1, "deltaT": 1, "total_step": 8}
_ENCODER = {"num_virtual_tokens": 3, "encoder_hidden_size": 16}
_COFT = {"oft_block_size": 4, "coft": True, "block_share": True, "use_cayley_neumann": False}
_GLORA = {"r": 4, "config_A_B": "vector", "config_C": "vector"}

_LORA: tuple[Method, ...] = (
    Method("lora", "LORA", lora()),
    Method("lora dropout", "LORA", lora(lora_dropout=0.3)),
    Method("lora all-linear", "LORA", m.all_linear),
    Method("lora bias", "LORA", lora(bias="all", lora_bias=True)),
    Method("lora head", "LORA", on("head", "LoraConfig", r=4)),
    Method("lora embedding", "LORA", on("embedding", "LoraConfig", r=4)),
    Method("lora convolution", "LORA", on("convolution", "LoraConfig", r=4)),
    Method("lora saved modules", "LORA", m.lora_of(modules_to_save=lambda s: [*s.norms, s.head])),
    Method("lora rank pattern", "LORA", m.lora_of(rank_pattern=lambda s: {n: 2 + i for i, n in enumerate(s.linear)})),
    Method("lora tokens", "LORA", m.tokens),
    Method("lora parameters", "LORA", m.parameters),
    Method("lora replication", "LORA", m.replicated),
    Method("lora mixed with loha", "LORA", lora(), wrap=m.wrap_mixed),
    Method("rslora", "LORA", lora(use_rslora=True)),
    Method("dora", "LORA", lora(use_dora=True)),
    Method("dora dropout", "LORA", lora(use_dora=True, lora_dropout=0.3)),
    Method("dora convolution", "LORA", on("convolution", "LoraConfig", r=4, use_dora=True)),
    Method("dora embedding", "LORA", on("embedding", "LoraConfig", r=4, use_dora=True)),
    Method("pissa", "LORA", lora(init_lora_weights="pissa")),
    Method("pissa niter", "LORA", lora(init_lora_weights="pissa_niter_4")),
    Method("olora", "LORA", lora(init_lora_weights="olora")),
    Method("gaussian", "LORA", lora(init_lora_weights="gaussian")),
    Method("orthogonal", "LORA", lora(init_lora_weights="orthogonal")),
    Method("mica", "LORA", lora(init_lora_weights="mica")),
    Method("loftq", "LORA", lora(init_lora_weights="loftq", loftq_config={"loftq_bits": 4, "loftq_iter": 1})),
    Method("eva", "LORA", lora(init_lora_weights="eva"), wrap=m.wrap_eva),
    Method(
        "corda", "LORA",
        m.lora_of(init_lora_weights=lambda s: "corda", corda_config=lambda s: lora_configs.CordaConfig()),
        wrap=m.wrap_corda,
    ),
    Method(
        "lora-ga", "LORA",
        m.lora_of(init_lora_weights=lambda s: "lora_ga", lora_ga_config=lambda s: lora_configs.LoraGAConfig()),
        wrap=m.wrap_lora_ga, unstable_start=True,
    ),
    Method("arrow", "LORA", lora(), wrap=m.wrap_arrow),
    Method("alora", "LORA", lora(alora_invocation_tokens=[3])),
    Method("bdlora", "LORA", m.lora_of(use_bdlora=m.blocks)),
    Method("velora", "LORA", m.lora_of(velora_config=lambda s: lora_configs.VeloraConfig(num_groups=4))),
    Method("monteclora", "LORA", m.lora_of(monteclora_config=lambda s: lora_configs.MontecloraConfig(num_samples=2))),
    Method("kasa", "LORA", m.lora_of(kasa_config=lambda s: lora_configs.KasaConfig())),
    Method("adalora", "ADALORA", on("linear", "AdaLoraConfig", **_ADALORA), after_backward=m.allocate),
    Method("xlora", "XLORA", m.mixture),
)  # fmt: skip

_LAYERS: tuple[Method, ...] = (
    Method("adamss", "ADAMSS", on("linear", "AdamssConfig", r=8, num_subspaces=2)),
    Method("beft", "BEFT", on("linear", "BeftConfig")),
    Method("boft", "BOFT", on("linear", "BOFTConfig", boft_block_size=4)),
    Method("boft dropout", "BOFT", on("linear", "BOFTConfig", boft_block_size=4, boft_dropout=0.3)),
    Method("c3a", "C3A", on("linear", "C3AConfig", block_size=8)),
    Method("deft", "DEFT", on("linear", "DeftConfig", r=4)),
    Method("deft qr", "DEFT", on("linear", "DeftConfig", r=4, decomposition_method="qr")),
    Method("delora", "DELORA", on("linear", "DeloraConfig", r=4)),
    Method("fourierft", "FOURIERFT", on("linear", "FourierFTConfig", n_frequency=40)),
    Method("frod", "FROD", on("linear", "FrodConfig", sparse_rate=0.1, progressbar=False)),
    Method("glora", "GLORA", on("linear", "GloraConfig", r=4), exact_types=True),
    Method("glora vector", "GLORA", on("linear", "GloraConfig", **_GLORA), exact_types=True),
    Method("gralora", "GRALORA", on("linear", "GraloraConfig", r=8, gralora_k=2)),
    Method("gralora hybrid", "GRALORA", on("linear", "GraloraConfig", r=8, gralora_k=2, hybrid_r=2)),
    Method("hira", "HIRA", on("linear", "HiraConfig", r=4)),
    Method("hra", "HRA", on("linear", "HRAConfig", r=4)),
    Method("hra orthogonal", "HRA", on("linear", "HRAConfig", r=4, apply_GS=True)),
    Method("hra convolution", "HRA", on("convolution", "HRAConfig", r=4)),
    Method("ia3", "IA3", m.ia3),
    Method("lily", "LILY", on("linear", "LilyConfig", r=4)),
    Method("ln tuning", "LN_TUNING", on("norms", "LNTuningConfig")),
    Method("loha", "LOHA", on("linear", "LoHaConfig", r=4)),
    Method("loha dropout", "LOHA", on("linear", "LoHaConfig", r=4, rank_dropout=0.3, module_dropout=0.3)),
    Method("loha convolution", "LOHA", on("convolution", "LoHaConfig", r=4)),
    Method("lokr", "LOKR", on("linear", "LoKrConfig", r=4)),
    Method("lokr decomposed", "LOKR", on("linear", "LoKrConfig", r=2, decompose_both=True)),
    Method("lokr convolution", "LOKR", on("convolution", "LoKrConfig", r=4)),
    Method("miss", "MISS", on("linear", "MissConfig", r=8)),
    Method("miss bat", "MISS", on("linear", "MissConfig", r=8, init_weights="bat")),
    Method("miss mini", "MISS", on("linear", "MissConfig", r=8, mini_r=4, init_weights="mini")),
    Method("oft", "OFT", on("linear", "OFTConfig", oft_block_size=4)),
    Method("oft constrained", "OFT", on("linear", "OFTConfig", **_COFT)),
    Method("oft convolution", "OFT", on("convolution", "OFTConfig", oft_block_size=4)),
    Method("osf", "OSF", on("linear", "OSFConfig", effective_rank=8)),
    Method("peanut", "PEANUT", on("linear", "PeanutConfig", r=4, depth=2)),
    Method("poly", "POLY", on("linear", "PolyConfig", r=4, n_tasks=2, n_skills=2), known_task=True, forward=_TASKS),
    Method("psoft", "PSOFT", on("linear", "PsoftConfig", r=8)),
    Method("pvera", "PVERA", on("linear", "PveraConfig", r=8)),
    Method("randlora", "RANDLORA", on("linear", "RandLoraConfig", r=4)),
    Method("road 1", "ROAD", on("linear", "RoadConfig", group_size=8)),
    Method("road 2", "ROAD", on("linear", "RoadConfig", group_size=8, variant="road_2")),
    Method("road 4", "ROAD", on("linear", "RoadConfig", group_size=8, variant="road_4")),
    Method("shadow", "SHADOW", prompt("ShadowConfig", r=4)),
    Method("shira", "SHIRA", on("linear", "ShiraConfig", r=4, random_seed=5)),
    Method("supertuning", "SUPERTUNING", on("linear", "SupertuningConfig", sparsity=0.9)),
    Method("supertuning lora", "SUPERTUNING", on("linear", "SupertuningConfig", sparsity=0.9, r=4)),
    Method("tinylora", "TINYLORA", on("linear", "TinyLoraConfig", u=8)),
    Method("trainable tokens", "TRAINABLE_TOKENS", on("embedding", "TrainableTokensConfig", token_indices=[3, 4, 5])),
    Method("unilora", "UNILORA", on("linear", "UniLoraConfig", r=4, theta_d_length=64)),
    Method("vblora", "VBLORA", on("linear", "VBLoRAConfig", r=4, num_vectors=16, vector_length=8)),
    Method("vera", "VERA", on("linear", "VeraConfig", r=8, vera_dropout=0.3)),
    Method("waveft", "WAVEFT", on("linear", "WaveFTConfig", n_frequency=40)),
)

_PROMPTS: tuple[Method, ...] = (
    Method("prompt tuning", "PROMPT_TUNING", prompt("PromptTuningConfig", num_virtual_tokens=3), known_task=True),
    Method(
        "multitask prompt tuning", "MULTITASK_PROMPT_TUNING",
        prompt("MultitaskPromptTuningConfig", num_virtual_tokens=3, num_tasks=2), known_task=True, forward=_TASKS,
    ),
    Method("p-tuning", "P_TUNING", prompt("PromptEncoderConfig", **_ENCODER), known_task=True),
    Method(
        "p-tuning lstm", "P_TUNING", prompt("PromptEncoderConfig", **_ENCODER, encoder_reparameterization_type="LSTM"),
        known_task=True,
    ),
    Method("prefix tuning", "PREFIX_TUNING", prompt("PrefixTuningConfig", num_virtual_tokens=3), known_task=True),
    Method(
        "prefix tuning projected", "PREFIX_TUNING", prompt("PrefixTuningConfig", **_ENCODER, prefix_projection=True),
        known_task=True,
    ),
    Method("cartridge", "CARTRIDGE", prompt("CartridgeConfig", num_virtual_tokens=4), known_task=True),
    Method("cpt", "CPT", prompt("CPTConfig", **_CPT), known_task=True),
    Method("adaption prompt", "ADAPTION_PROMPT", prompt("AdaptionPromptConfig", adapter_len=3, adapter_layers=2)),
)  # fmt: skip

METHODS: tuple[Method, ...] = (*_LORA, *_LAYERS, *_PROMPTS)
BY_METHOD: dict[str, Method] = {row.name: row for row in METHODS}
