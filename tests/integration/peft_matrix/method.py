"""The class of a row in the table of PEFT methods, and functions for configs that need more than options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
from peft import LoraConfig, PeftConfig
from peft.tuners.lora import config as lora_configs

from .subjects import Subject, for_prompts


class NotApplicableError(Exception):
    """The model has no module of the kind that the method is asked to change."""


@dataclass(frozen=True)
class Context:
    """What the function that makes a config gets: the model, and a folder for methods that read files."""

    subject: Subject
    folder: Path


def _get_peft_model(model: Any, config: PeftConfig, context: Context) -> Any:
    return peft.get_peft_model(model, config)


@dataclass(frozen=True)
class Method:
    """One row.

    Attributes:
        peft_type: PEFT's name of the method.
        config: Makes the config for a model.
        known_task: PEFT has to know the task, because the method changes the inputs and the labels.
        forward: Keywords that the forward needs beside the batch's.
        after_backward: What PEFT's documentation tells the user to call between backward and the optimizer.
        wrap: The function to call instead of `get_peft_model` if the method needs more calls.
        unstable_start: The initial adapter is computed from gradients and magnifies their rounding errors: noise of
            1e-7 in stock's gradients changes that of LoRA-GA by 1e-2 to 1e-1. So the initial adapter is not compared.
        exact_types: PEFT only accepts layers of torch's own type, so `patch_model` has to come second.
    """

    name: str
    peft_type: str
    config: Callable[[Context], PeftConfig]
    known_task: bool = False
    forward: dict[str, Any] = field(default_factory=dict)
    after_backward: Callable[[Any, int], None] | None = None
    wrap: Callable[[Any, PeftConfig, Context], Any] = _get_peft_model
    unstable_start: bool = False
    exact_types: bool = False

    def subject(self, subject: Subject) -> Subject:
        """The model as this method needs it."""
        return for_prompts(subject) if self.known_task else subject


Make = Callable[[Context], PeftConfig]


def on(modules: str, config: str, **options: Any) -> Make:
    """A config whose targets are the field `modules` of the Subject."""

    def make(context: Context) -> PeftConfig:
        targets = getattr(context.subject, modules)
        targets = [targets] if isinstance(targets, str) else list(targets)
        if not all(targets):
            raise NotApplicableError(f"{context.subject.name} has no {modules}")
        made: PeftConfig = getattr(peft, config)(task_type=context.subject.task_type, target_modules=targets, **options)
        return made

    return make


def prompt(config: str, **options: Any) -> Make:
    """A config without targets."""

    def make(context: Context) -> PeftConfig:
        made: PeftConfig = getattr(peft, config)(task_type=context.subject.task_type, **options)
        return made

    return make


def lora(**options: Any) -> Make:
    """LoRA on the linear layers."""
    return on("linear", "LoraConfig", **{"r": 4, **options})


def lora_of(**options: Callable[[Subject], Any]) -> Make:
    """LoRA on the linear layers, with options that depend on the model."""

    def make(context: Context) -> PeftConfig:
        return lora(**{name: option(context.subject) for name, option in options.items()})(context)

    return make


def all_linear(context: Context) -> PeftConfig:
    return LoraConfig(task_type=context.subject.task_type, r=4, target_modules="all-linear")


def ia3(context: Context) -> PeftConfig:
    return on("linear", "IA3Config", feedforward_modules=list(context.subject.feedforward))(context)


def tokens(context: Context) -> PeftConfig:
    """LoRA, and some rows of the embedding that are trained."""
    if not context.subject.embedding:
        raise NotApplicableError(f"{context.subject.name} has no embedding")
    return lora(trainable_token_indices={context.subject.embedding: [3, 4, 5]})(context)


def parameters(context: Context) -> PeftConfig:
    """LoRA on a parameter, which PEFT applies by a parametrisation of the module that holds it."""
    subject = context.subject
    names = [f"{name}.weight" for name in subject.square]
    return LoraConfig(task_type=subject.task_type, target_modules=[], target_parameters=names, r=4)


def replicated(context: Context) -> PeftConfig:
    """Layers that are used twice, each time with adapters of its own."""
    if context.subject.name != "llama":
        raise NotApplicableError("PEFT replicates the layers of Llama, Falcon and Mistral")
    return lora(layer_replication=[(0, 2), (1, 2)])(context)


def blocks(subject: Subject) -> Any:
    return lora_configs.BdLoraConfig(
        target_modules_bd_a=list(subject.feedforward), target_modules_bd_b=list(subject.square), nblocks=2,
        match_strict=False,
    )  # fmt: skip


def _saved_loras(context: Context) -> list[str]:
    """Folders of two LoRA adapters of the model, for methods that mix them."""
    folders = []
    for i in range(2):
        model = context.subject.family.build()
        torch.manual_seed(i)
        adapted = peft.get_peft_model(model, lora(init_lora_weights=False)(context))
        folders.append(str(context.folder / f"mixed{i}"))
        adapted.save_pretrained(folders[i])
    return folders


def mixture(context: Context) -> PeftConfig:
    """X-LoRA mixes adapters that it reads from disk."""
    adapters = {str(i): folder for i, folder in enumerate(_saved_loras(context))}
    return peft.XLoraConfig(
        task_type=context.subject.task_type, hidden_size=32, adapters=adapters, xlora_depth=2, xlora_size=8
    )


def _every_row(layer_input: Any, model_input: Any, layer_name: str) -> torch.Tensor:
    """All rows. EVA must use them if there is no mask, or if the mask is not the decoder's."""
    x: torch.Tensor = layer_input[0] if isinstance(layer_input, tuple) else layer_input
    return x.reshape(-1, x.shape[-1])


def wrap_eva(model: Any, config: PeftConfig, context: Context) -> Any:
    """EVA starts from the singular vectors of what the layers see."""
    adapted = peft.get_peft_model(model, config)
    options: dict[str, Any] = {"show_progress_bar": False}
    if context.subject.family.task in ("image", "seq2seq"):
        options |= {"prepare_model_inputs_fn": None, "prepare_layer_inputs_fn": _every_row}
    peft.initialize_lora_eva_weights(adapted, [context.subject.batch()] * 4, **options)
    return adapted


def wrap_corda(model: Any, config: PeftConfig, context: Context) -> Any:
    """CorDA starts from the covariances of what the layers see. It takes one sample at a time."""
    from peft.tuners.lora.corda import preprocess_corda

    sample = {name: x[:1] for name, x in context.subject.batch().items()}
    preprocess_corda(model, config, run_model=lambda: model(**sample))
    return peft.get_peft_model(model, config)


def wrap_lora_ga(model: Any, config: PeftConfig, context: Context) -> Any:
    """LoRA-GA starts from the gradients of the weights."""
    peft.preprocess_loraga(model, config, lambda: model(**context.subject.batch()).loss.backward())
    return peft.get_peft_model(model, config)


def wrap_arrow(model: Any, config: PeftConfig, context: Context) -> Any:
    """Arrow routes each token to one of several saved adapters."""
    adapted = peft.create_arrow_model(
        base_model=model, task_specific_adapter_paths=_saved_loras(context),
        arrow_config=lora_configs.ArrowConfig(top_k=1, rng_seed=3),
    )  # fmt: skip
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return adapted


def wrap_mixed(model: Any, config: PeftConfig, context: Context) -> Any:
    """Two methods at once, both switched on."""
    adapted = peft.get_peft_model(model, config, mixed=True)
    adapted.add_adapter("other", on("linear", "LoHaConfig", r=2)(context))
    adapted.set_adapter(["default", "other"])
    return adapted


def allocate(model: Any, step: int) -> None:
    """AdaLoRA drops ranks by the gradients that it has just seen."""
    model.base_model.update_and_allocate(step)
