"""Reports what `patch_model` changed in a model and what it left alone, for the model's present state."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from .codecs.table import CODECS
from .config import CompressionConfig, preset_of
from .display.report import Report
from .display.tables import Table
from .errors import NotPatchedError
from .layers import LayerSettings, PlannedLayer, left_out
from .models.checkpointing import is_switched_on
from .models.foreign import find_foreign
from .models.heads import find_head
from .models.root import pretrained_models, root_module, root_of
from .models.rows_left_out import why_not
from .models.rules import Places, find_site
from .models.sites import Declined, Site
from .modules.base import PLAIN_TENSORS, Settings, settings_of, stock_type
from .roles import Role

_INERT = (
    "its forward has been bound on the instance since it was patched (device_map or offload hooks, Liger), so the "
    "patched forward does not run"
)
_ATTENTION_DROPOUT = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "dropout_rate")
_NO_GRAPH = (
    "a training step cannot be captured in a CUDA graph where attention with dropout, or a checkpointed layer with "
    "dropout, runs again in backward: its masks are drawn from the generator's offset, which a capture hides"
)
# parts of a name that the table shows
_SHOWN, _WIDEST = 2, 15
_NEW = "came after patch_model; the next forward in training patches it"


@dataclass(frozen=True)
class PatchRow:
    """One module: what it became and keeps, or why it was left alone (`reason`).

    `note` says why a patched module keeps something other than what the config asks for.
    """

    name: str
    module: str
    role: str
    kind: str = ""
    codec: str = ""
    keeps: str = ""
    reason: str = ""
    note: str = ""


@dataclass(frozen=True)
class PatchReport(Report):
    """Every module that a rule knows. Prints with rich (`print()`), serialises (`to_json()`)."""

    rows: tuple[PatchRow, ...]

    @property
    def patched(self) -> tuple[PatchRow, ...]:
        return tuple(row for row in self.rows if not row.reason)

    @property
    def left_alone(self) -> tuple[PatchRow, ...]:
        return tuple(row for row in self.rows if row.reason)

    def __str__(self) -> str:
        roles = Counter(row.role for row in self.patched)
        patched = ", ".join(f"{count} {role}" for role, count in sorted(roles.items())) or "nothing"
        lines = [f"patched: {patched}"]
        lines += [f"remark: {text}" for text in _counted((row.role, row.note) for row in self.patched)]
        lines += [f"left alone: {text}" for text in _counted((row.role, row.reason) for row in self.left_alone)]
        return "\n".join(lines)

    def line(self, config: CompressionConfig) -> str:
        """What was patched, with which config, in a few words: "patched 16 layers, exact"."""
        layers = sum(row.role == Role.LAYER for row in self.patched)
        count, what = (layers, "layer") if layers else (len(self.patched), "module")
        name = preset_of(config)
        if name != "exact":
            name += ", exact" if config.lossless else ", lossy"
        left = Counter(row.role for row in self.left_alone if row.role != Role.EMBEDDING)
        alone = "; left alone: " + ", ".join(f"{n} {role}" for role, n in left.most_common()) if left else ""
        return f"patched {count} {what}{'' if count == 1 else 's'}, {name}{alone}"

    def fall_backs(self) -> list[str]:
        """How many modules are otherwise than the config asks for, and why, most first; embeddings never are."""
        rows = (row for row in self.rows if row.role != Role.EMBEDDING)
        return _counted((row.role, row.reason or row.note) for row in rows)

    def tables(self) -> tuple[Table, ...]:
        """The table, with a row for all modules that are alike; `rows` has each of them, and `str` the remarks."""
        alike: dict[tuple[str, ...], list[str]] = {}
        for row in self.rows:
            state = "left alone" if row.reason else row.keeps
            alike.setdefault((row.role, row.codec, state, row.kind, row.note), []).append(row.name)
        rows = [(str(len(names)), *key[:3], _place(names)) for key, names in alike.items()]
        return (Table(("count", "role", "codec", "keeps", "such as"), rows, ("count",), "hf_actcompress"),)


def _place(names: Sequence[str]) -> str:
    """The end of the first name, with a star for the number of a layer if there are several."""
    shown = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", names[0]) if len(names) > 1 else names[0]
    parts = shown.split(".")
    place = ".".join(parts[-_SHOWN:])
    return (place if len(place) <= _WIDEST else parts[-1]) or "(model)"


def _counted(rows: Iterable[tuple[str, str]]) -> list[str]:
    """How many modules of which role have which remark, for each remark, most first."""
    remarks = Counter((role, remark) for role, remark in rows if remark)
    return [f"{count} {role}: {remark}" for (role, remark), count in remarks.most_common()]


def patch_report(model: nn.Module) -> PatchReport:
    """What is patched in a model, and what is left alone and why.

    The report describes the model as it is now, even if adapters, heads and weights were replaced after `patch_model`.
    Modules that no rule knows and that keep activations of their own are listed, too.

    Raises:
        NotPatchedError: The model is not patched.
    """
    root = root_of(model)
    if root is None:
        raise NotPatchedError(f"{type(model).__name__} is not patched; call patch_model(model) first")
    return PatchReport(tuple(_rows(model, root.config)))


def is_parametrization(name: str) -> bool:
    """Whether a module computes a parameter, so that no activation passes through it."""
    return ".parametrizations." in f".{name}."


def _rows(model: nn.Module, config: CompressionConfig) -> Iterator[PatchRow]:
    role = Role.PADDING if config.drop_padding else Role.SHARED_PROMPTS if config.share_prompts else None
    if role and (reason := why_not(root_module(model))):
        yield PatchRow("", type(root_module(model)).__name__, role, reason=reason)
    places, without_plan = Places.of(model), left_out(model, config)
    for name, module in model.named_modules():
        if is_parametrization(name):
            continue
        settings = settings_of(module)
        if id(module) in without_plan:
            note = f"{without_plan[id(module)]}; it runs module by module"
            yield PatchRow(name, stock_type(module).__name__, Role.LAYER, "module by module", note=note)
            if settings is not None:
                yield _patched(name, module, settings)
            continue
        if id(module) in places.heads and (settings is None or settings.role != Role.LOSS_HEAD):
            found = find_head(module, config.at(name))
            if isinstance(found, Declined):
                yield _declined(name, module, found)
        if settings is not None:
            yield _patched(name, module, settings)
            if isinstance(settings, LayerSettings) and settings.kept is not None:
                yield _patched(name, module, settings.kept)
        elif (row := _left_alone(name, module, config)) is not None:
            yield row
    for name, module in model.named_modules():
        if is_switched_on(module):
            yield PatchRow(name, type(module).__name__, Role.CHECKPOINT, "layer", keeps="input")
    if _on_cuda(model) and _draws_again(model):
        yield PatchRow("", type(root_module(model)).__name__, Role.CUDA_GRAPH, reason=_NO_GRAPH)


def _on_cuda(model: nn.Module) -> bool:
    return any(parameter.is_cuda for parameter in model.parameters())


def _draws_again(model: nn.Module) -> bool:
    """Whether any masks are drawn again in backward. Dropout modules do not count: in a CUDA graph they keep bits."""
    configs = [part.config for part in pretrained_models(model).values()]
    if any(getattr(config, name, 0.0) for config in configs for name in _ATTENTION_DROPOUT):
        return True
    drops = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
    return drops and any(is_switched_on(module) for module in model.modules())


def _patched(name: str, module: nn.Module, settings: Settings) -> PatchRow:
    codec = next(name for name, codec in CODECS.items() if codec == settings.codec.row)
    stock, weight = stock_type(module).__name__, module._parameters.get("weight")
    reason = ""
    if "forward" in module.__dict__:
        reason = _INERT
    elif weight is not None and type(weight) not in PLAIN_TENSORS:
        reason = f"its weight is a {type(weight).__name__}, not a plain tensor: the stock forward runs"
    note = _note_of_calls(settings) if isinstance(settings, LayerSettings) else settings.note
    return PatchRow(name, stock, settings.role, settings.kind, codec, settings.reported, reason=reason, note=note)


def _note_of_calls(settings: LayerSettings) -> str:
    """How many calls ran module by module, which gives the same numbers and takes the host longer, and why plans are
    not compiled that should be; "" if there is nothing to say."""
    plans: PlannedLayer = settings.plans
    notes = []
    if plans.leaf_calls:
        calls = plans.calls + plans.leaf_calls
        notes.append(f"{plans.leaf_calls} of {calls} calls ran module by module; of the last one, {plans.why}")
    reasons = plans.why_not_compiled() if settings.compile else []
    return "; ".join([*notes, *(f"not compiled: {reason}" for reason in reasons)])


def _left_alone(name: str, module: nn.Module, config: CompressionConfig) -> PatchRow | None:
    found = find_site(module, config.at(name))
    if isinstance(found, Site):
        return PatchRow(name, stock_type(module).__name__, found.settings.role, reason=_NEW)
    found = found or find_foreign(module)
    return _declined(name, module, found) if found is not None else None


def _declined(name: str, module: nn.Module, found: Declined) -> PatchRow:
    return PatchRow(name, stock_type(module).__name__, found.role, reason=found.reason)
