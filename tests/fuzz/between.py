"""What happens between a forward and its backward: the rows of `BETWEEN`.

Each row is done on every side of a case, so that stock says what has to come out of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_actcompress import unpatch_model
from tests.fuzz.families import EAGER_ONLY, FUZZED, NO_ATTENTION
from tests.fuzz.hooks import add_hook

if TYPE_CHECKING:
    from tests.fuzz.programs import Run


@dataclass
class Moment:
    """A forward has run, and its backward has not. `loss` is what backward will start from."""

    run: Run
    model: Any
    loss: Tensor
    output: Any = None

    @property
    def base(self) -> Any:
        """The model of transformers, without PEFT's."""
        return inner(self.model)


@dataclass(frozen=True)
class Between:
    """One row.

    Attributes:
        then: What is done between forward and backward.
        before: What is done before the forward.
        changes: Fields that the case has to have.
    """

    then: Callable[[Moment], None]
    before: Callable[[Any], None] = lambda model: None
    changes: dict[str, Any] = field(default_factory=dict)


def inner(model: Any) -> Any:
    """The model of transformers, without PEFT's around it."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def _parts(model: nn.Module) -> list[nn.Parameter]:
    """Every third parameter that can be trained, so that each layer has some of them."""
    return [p for p in model.parameters() if p.is_floating_point()][1::3]


def _freeze(moment: Moment) -> None:
    moment.model.requires_grad_(False)


def _unfreeze(moment: Moment) -> None:
    moment.model.requires_grad_(True)


def _freeze_parts(model: nn.Module) -> None:
    for p in _parts(model):
        p.requires_grad_(False)


def _without_adapters(model: Any) -> None:
    """Some of the base model's own weights are trained instead, so that there is a gradient."""
    model.base_model.disable_adapter_layers()
    _train_base(model)


def _train_base(model: Any) -> None:
    """Train some weights of the base model, too. PEFT freezes an adapter that it switches off."""
    for p in _parts(model.get_base_model()):
        p.requires_grad_(True)


def _switch(moment: Moment, *, off: bool = False) -> None:
    """Another adapter becomes active, or none; all of them stay trained, although PEFT freezes those."""
    if off:
        moment.model.base_model.disable_adapter_layers()
    else:
        moment.model.set_adapter("other")
    for name, p in moment.model.named_parameters():
        if "lora_" in name:
            p.requires_grad_(True)


def _dropout_rates(moment: Moment) -> None:
    """Every rate of a dropout, of modules and of attention's attributes, is another one."""
    for module in moment.model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and (name == "p" or "drop" in name):
                setattr(module, name, 0.7)


def _add_hooks(moment: Moment) -> None:
    case = moment.run.case
    for place in ("linear", "norm", "activation", "dropout", "attention", "mlp", "layer"):
        add_hook(moment.model, "replace", place, case.at, lambda name, x: None)


def _remove_hooks(moment: Moment) -> None:
    for handle in moment.run.handles:
        handle.remove()


def _second(moment: Moment) -> Tensor:
    return moment.run.forward(moment.model, moment.run.batch(1), "second forward")


def _both(moment: Moment) -> None:
    moment.loss = moment.loss + _second(moment)


def _only_first(moment: Moment) -> None:
    _second(moment)


def _only_second(moment: Moment) -> None:
    moment.loss = _second(moment)


def _to_double_and_back(moment: Moment) -> None:
    if moment.run.side != "oracle":
        moment.model.double().to(getattr(torch, DTYPES.get(moment.run.case.mode, "float32")))


def _to(moment: Moment) -> None:
    """A dtype that the weights do not have, and not back."""
    moment.model.to(torch.float32 if moment.run.case.mode in DTYPES else torch.bfloat16)


def _optimizer_step(moment: Moment, *, small: bool = False) -> None:
    """SGD changes the weights in place; `small`: only the vectors, as norms have them."""
    weights = [p for p in moment.model.parameters() if p.requires_grad and (p.dim() == 1 or not small)]
    for p in weights:
        p.grad = torch.full_like(p, 0.01)
    optimizer = torch.optim.SGD(weights or [torch.zeros(1, requires_grad=True)], lr=0.1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _evaluate(moment: Moment) -> None:
    with torch.no_grad():
        moment.run.forward(moment.model.eval(), moment.run.batch(1), "evaluation")
    moment.model.train()


def _averages(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.data * 0.9 for name, p in model.named_parameters()}


def _ema_copied(moment: Moment, *, back: bool = True) -> None:
    """Averaged weights are copied into the parameters through `.data`, and after an evaluation the old ones again."""
    old = {name: p.data.clone() for name, p in moment.model.named_parameters()}
    new = _averages(moment.model)
    for name, p in moment.model.named_parameters():
        p.data.copy_(new[name])
    _evaluate(moment)
    if back:
        for name, p in moment.model.named_parameters():
            p.data.copy_(old[name])


def _ema_swapped(moment: Moment) -> None:
    """As `_ema_copied`, but `.data` becomes another tensor."""
    old = {name: p.data for name, p in moment.model.named_parameters()}
    new = _averages(moment.model)
    for name, p in moment.model.named_parameters():
        p.data = new[name]
    _evaluate(moment)
    for name, p in moment.model.named_parameters():
        p.data = old[name]


def _generate(moment: Moment) -> None:
    """Greedy text where the model can write some, an evaluation elsewhere."""
    if FUZZED[moment.run.case.family].task not in ("causal", "seq2seq") or moment.run.side == "oracle":
        _evaluate(moment)
        return
    ids = torch.arange(5, 15).view(2, 5)
    with torch.no_grad():
        moment.model.eval().generate(input_ids=ids, max_new_tokens=3, do_sample=False)
    moment.model.train()


def _copy(moment: Moment) -> None:
    copy.deepcopy(moment.model)


def _copy_and_use(moment: Moment) -> None:
    other, batch = copy.deepcopy(moment.model), moment.run.batch(1)
    moment.run.forward(other, batch, "the copy").backward()
    moment.run.gradients(other, batch, "the copy")


def _unpatch(moment: Moment) -> None:
    if moment.run.side == "ours":
        unpatch_model(moment.model)


def _other_attention(moment: Moment) -> None:
    if moment.run.case.family not in (*EAGER_ONLY, *NO_ATTENTION):
        moment.base.set_attn_implementation("eager" if moment.run.case.attention == "sdpa" else "sdpa")


def _of(*choose: Callable[[Any], Any]) -> Callable[[Moment], None]:
    """The loss becomes the mean of a function of one part of the outputs: of the first that the model returns."""

    def then(moment: Moment) -> None:
        found: Any = None
        for part in choose:
            try:
                found = part(moment.output)
            except (AttributeError, IndexError, KeyError, TypeError):
                continue
            if isinstance(found, Tensor) and found.requires_grad:
                break
        if isinstance(found, Tensor) and found.requires_grad:
            moment.loss = found.float().square().mean()

    return then


def _first_hidden(output: Any) -> Any:
    return output.encoder_hidden_states[1] if "encoder_hidden_states" in output else output.hidden_states[1]


_ADAPTERS: dict[str, Any] = {"lora": "plain"}
_TWO: dict[str, Any] = {"lora": "two"}
# of the base model's weights, where it is not fp32
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}

BETWEEN: dict[str, Between] = {
    "nothing": Between(lambda moment: None),
    "eval": Between(lambda moment: moment.model.eval()),
    "train": Between(lambda moment: moment.model.train()),
    "eval-then-train": Between(lambda moment: moment.model.train(), lambda model: model.eval()),
    "freeze": Between(_freeze),
    "unfreeze": Between(_unfreeze),
    "freeze-part": Between(lambda moment: _freeze_parts(moment.model)),
    "unfreeze-part": Between(_unfreeze, _freeze_parts),
    "set-adapter": Between(lambda moment: moment.model.set_adapter("other"), _train_base, _TWO),
    "set-adapter-trained": Between(_switch, changes=_TWO),
    "disable-adapters": Between(
        lambda moment: moment.model.base_model.disable_adapter_layers(), _train_base, _ADAPTERS
    ),
    "disable-adapters-trained": Between(lambda moment: _switch(moment, off=True), changes=_ADAPTERS),
    "enable-adapters": Between(
        lambda moment: moment.model.base_model.enable_adapter_layers(),
        _without_adapters, _ADAPTERS,
    ),
    "merge": Between(lambda moment: moment.model.merge_adapter(), changes=_ADAPTERS),
    "merge-unmerge": Between(
        lambda moment: (moment.model.merge_adapter(), moment.model.unmerge_adapter()), changes=_ADAPTERS
    ),
    "dropout-rate": Between(_dropout_rates),
    "add-hooks": Between(_add_hooks),
    "remove-hooks": Between(_remove_hooks),
    "second-both": Between(_both),
    "second-only-first": Between(_only_first),
    "second-only-second": Between(_only_second),
    "to-double-and-back": Between(_to_double_and_back),
    "to": Between(_to),
    "optimizer-step": Between(_optimizer_step),
    "optimizer-step-vectors": Between(lambda moment: _optimizer_step(moment, small=True)),
    "evaluation": Between(_evaluate),
    "ema-copied": Between(_ema_copied),
    "ema-swapped": Between(_ema_swapped),
    "generate": Between(_generate),
    "copy": Between(_copy),
    "copy-used": Between(_copy_and_use),
    "unpatch": Between(_unpatch),
    "attention": Between(_other_attention),
    "loss-hidden": Between(_of(_first_hidden), changes={"hidden": True}),
    "loss-encoder": Between(
        _of(lambda o: o.encoder_last_hidden_state, lambda o: o.hidden_states[0]), changes={"hidden": True}
    ),
    "loss-keys": Between(
        _of(lambda o: o.past_key_values.layers[-1].keys, _first_hidden), changes={"hidden": True, "cache": True}
    ),
    "loss-values": Between(
        _of(lambda o: o.past_key_values.layers[-1].values, _first_hidden), changes={"hidden": True, "cache": True}
    ),
    "loss-attentions": Between(_of(lambda o: o.attentions[-1], _first_hidden), changes={"hidden": True}),
    "loss-logits": Between(_of(lambda o: o.logits[:, :1]), changes={"keep_logits": True}),
}  # fmt: skip
