"""`estimate`: what a training will need, before any weights or a GPU are at hand."""

from __future__ import annotations

from typing import Any, Unpack

import torch

from ...config import CompressionConfig, Configured
from ...quick.diffusion import PictureSizes
from .estimates import Estimates
from .result import Estimate

__all__ = ["Estimate", "estimate"]


def estimate(
    model: Any,
    *,
    batch_size: int,
    seq_len: int | None = None,
    config: CompressionConfig | Configured | str | None = "exact",
    dtype: torch.dtype | str | None = None,
    optimizer: str = "adamw",
    lora: Any = None,
    gradient_checkpointing: bool = False,
    device: str = "cuda",
    autocast: torch.dtype | str | None = None,
    engine: str | None = None,
    quantization: Any = None,
    trust_remote_code: bool = False,
    target_len: int | None = None,
    fsdp: int = 1,
    zero: int | None = None,
    processes: int = 1,
    trl: bool = False,
    **sizes: Unpack[PictureSizes],
) -> Estimate:
    """Memory of a training by part. It needs no weights, no GPU and no real step; a model of any size takes seconds.

    The model runs one forward and backward on fake tensors, which have shapes and no data, with two to four of its
    layers. Where its layers are of one kind, each further layer adds the same bytes, which is checked; where they are
    not, all layers are run. The batch has no padding and all its labels count. With padding `drop_padding` keeps less
    than this, so for it the estimate is an upper bound.

    Args:
        model: A module (stock or patched; it is not changed), a config, or a name: a folder with a config.json, that of
            a pipeline of diffusers, a JSON file, or a model of the Hugging Face hub, of which only the config is read.
        batch_size, seq_len: Sequences, and tokens per sequence; for images seq_len is ignored. In a vision-language
            model each sequence has one picture, whose tokens are among the `seq_len`; a note says how large it is.
        config: What the model is patched with: a preset's name, a config, or an object that carries one. None or
            "stock": the model is not patched.
        dtype: Dtype of the weights, or its name; by default the module's own, or what the config says.
        optimizer: "adamw", "adamw_32bit" and "adamw_8bit" (bitsandbytes), "adafactor", "sgd_momentum", "sgd", or what
            `optim` of the Trainer takes. The states of a paged one are counted as on the card.
        lora: True (peft's defaults on all linear layers), a rank, or a peft LoraConfig; all other weights are frozen.
        gradient_checkpointing: True switches it on; False leaves a module as it is.
        device: "cuda": the rules of fake_step/cuda_rules.py. "cpu": what the CPU's allocator would show.
        autocast: Dtype of mixed precision (with weights in fp32), by the CPU's list of ops. None: no autocast.
        engine: "eager", or "compile" for `torch.compile` with Inductor; by default the engine that the module is set up
            for, and "eager" if `model` is no module. With "compile" the model is traced and no code is generated: what
            is kept is what the graphs keep, and the peak is that of their buffers, with pointwise ops fused into the
            kernels that read them.
        quantization: Of frozen weights: "nf4" (4 bits, double quantisation), "fp4", "int8", or a `quantization_config`
            of transformers (bitsandbytes, GPTQ, AWQ, torchao, mxfp4). None: what the config or the module has.
        trust_remote_code: Run code that comes with the model's config, where transformers has none of its own.
        target_len: Tokens of the labels of an encoder-decoder model; by default as many as the inputs have.
        fsdp: Number of processes over which `fully_shard` (FSDP2) shards the model, each layer by itself. The batch and
            all bytes are those of one process. What a backend allocates inside a collective is not counted.
        zero: Stage 2 or 3 of DeepSpeed's ZeRO, by its documented defaults. No DeepSpeed run has confirmed them, and a
            note says so. With `autocast` all weights have that dtype, as DeepSpeed's `bf16` and `fp16` hold them.
        processes: Number of processes: ZeRO divides the states among them; without `zero`, DistributedDataParallel
            gives each the whole model. The batch and all bytes are those of one process.
        trl: Use the loss of TRL's trainers, whose fused head never makes the whole logits, for stock and patched
            models. By default the model's own loss is used.
        sizes: For a model of diffusers (Flux, SD3, Wan, LTX, UNet) in place of `seq_len`: height and width in pixels,
            frames, and text_tokens, the tokens of a caption; by default those of its pipeline.

    Returns:
        The estimate: bytes by part and by role, `.print()`, `.to_json()`.

    Raises:
        ModelConfigError: No config can be found under that name, the model computes no loss from labels, or it needs
            code of its own that was not trusted. With engine="compile" also: it cannot be traced as one graph.
        UnknownOptionError: An unknown preset, optimizer, dtype, device or engine.
        MissingExtraError: LoRA was asked for and peft is not installed.
    """
    processing: dict[str, Any] = {"fsdp": fsdp, "zero": zero, "processes": processes, "trl": trl}
    several = Estimates(
        model,
        dtype=dtype,
        optimizer=optimizer,
        lora=lora,
        device=device,
        autocast=autocast,
        engine=engine,
        quantization=quantization,
        trust_remote_code=trust_remote_code,
        target_len=target_len,
        **processing,
        **sizes,
    )
    return several.replayed(batch_size, several.tokens(seq_len), config, gradient_checkpointing)
