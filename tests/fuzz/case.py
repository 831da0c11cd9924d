"""A case of the fuzz: its fields, the weights with which their values are drawn, and its text on one line."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.between import BETWEEN
from tests.fuzz.families import EAGER_ONLY, FUZZED
from tests.fuzz.hooks import KINDS, PLACES

# values that other tests cover less are drawn more often
WEIGHTS: dict[str, dict[Any, int]] = {
    "family": dict.fromkeys(FUZZED, 1),
    "mode": {"fp32": 2, "bf16": 2, "fp16": 3, "autocast": 2, "autocast-fp16": 3},
    "dropout": {0.0: 1, 0.1: 2, 0.5: 1},
    "lora": {"none": 3, "plain": 2, "dropout": 2, "two": 1},
    "checkpointing": {"none": 4, "non-reentrant": 2, "reentrant": 1},
    "patch_first": {False: 1, True: 1},
    "padding": {"none": 2, "right": 2, "left": 2, "row": 2, "holes": 1},
    "preset": {
        "exact": 10, "long": 2, "int8": 2, "int4": 2, "adaptive": 1, "fp8": 2, "offload": 2, "tempo": 2, "inverted": 1,
        "fewbit": 1, "forward_ad": 1, "dropit": 1, "blocksparse": 1, "pooled": 1, "sampled": 1, "wtacrs": 1,
    },
    "loss_head": {True: 2, False: 1},
    "keep_logits": {True: 1, False: 3},
    "drop_padding": {False: 2, True: 1},
    "plans": {False: 1, True: 1},
    "batch": {1: 2, 2: 1, 3: 2, 5: 1},
    "length": {1: 1, 2: 1, 7: 2, 13: 3, 16: 1, 33: 1},
    "labels": {"some": 5, "none": 1, "empty": 1, "both": 1, "counted": 1},
    "special": {
        "none": 8, "nan-weight": 1, "inf-weight": 1, "large-weight": 2, "nan-input": 1, "inf-input": 1,
        "nan-padding": 1,
    },
    "embeds": {False: 3, True: 1},
    "attention": {"sdpa": 4, "eager": 1},
    "cache": {False: 1, True: 1},
    "hidden": {False: 4, True: 1},
    "program": {
        "step": 3, "accumulate": 1, "two-models": 2, "beside-stock": 2, "two-graphs": 1, "retain": 1,
        "autocast-backward": 1, "partial": 1, "eval-between": 1, "scaler": 2, "unpatched-backward": 1, "threads": 1,
    },
    "between": {name: 30 if name == "nothing" else 1 for name in BETWEEN},
    "hook": {"none": len(KINDS), **dict.fromkeys(KINDS, 1)},
    "place": dict.fromkeys(PLACES, 1),
    "at": dict.fromkeys(range(8), 1),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """The setting of one comparison. The defaults are the simplest case, to which a failing one is reduced.

    Attributes:
        mode: The dtype of the weights, or "autocast" (bf16) and "autocast-fp16" over fp32 weights.
        lora: No adapters, LoRA on all linear layers, that with `lora_dropout`, or "two": a second adapter of another
            rank on half of the layers, which is not active.
        patch_first: Patch before LoRA, gradient checkpointing and hooks are put on, or after.
        padding: Where the attention mask is 0. "row": the last row of the batch has no real token at all.
        labels: "some" with -100 at padding, "none" (the loss is made from the logits), "empty" (all -100), "both" (the
            model's loss and one from its logits), "counted" (`num_items_in_batch` as the Trainer hands it in).
        special: What is put into one weight or into the inputs; "large-weight" overflows in fp16.
        embeds: Hand in `inputs_embeds` that require a gradient.
        program: The order of forwards and backwards (tests/fuzz/programs.py).
        between: What happens between the forward and the backward of "step" (tests/fuzz/between.py).
        hook: What a hook does that is put on before the forward (tests/fuzz/hooks.py).
        place: The kind of module that the hook is on, and with `at` which one of them.
    """

    family: str = "llama"
    mode: str = "fp32"
    dropout: float = 0.0
    lora: str = "none"
    checkpointing: str = "none"
    patch_first: bool = False
    padding: str = "none"
    preset: str = "exact"
    loss_head: bool = True
    keep_logits: bool = False
    drop_padding: bool = False
    plans: bool = False
    batch: int = 3
    length: int = 13
    labels: str = "some"
    special: str = "none"
    embeds: bool = False
    attention: str = "sdpa"
    cache: bool = False
    hidden: bool = False
    program: str = "step"
    between: str = "nothing"
    hook: str = "none"
    place: str = "linear"
    at: int = 0
    seed: int = 0

    def __str__(self) -> str:
        """The fields that differ from the defaults, on one line; `parse` reads it."""
        plain = Case()
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return " ".join(f"{name}={value}" for name, value in values.items() if value != getattr(plain, name)) or "-"

    def tidy(self) -> Case:
        """The same case without combinations that are not possible, so that every drawn case can run."""
        family = FUZZED[self.family]
        changes: dict[str, Any] = {} if self.between == "nothing" else self._for_between()
        changes.update(self._for_hook())
        if self.family in EAGER_ONLY:
            changes["attention"] = "eager"
        if family.task == "image":
            changes.update(padding="none", embeds=False, cache=False, length=13)
            changes["hidden"] = self.between.startswith("loss-")
        if family.task != "causal":
            changes["cache"] = False
        if self.labels == "counted" and family.task != "causal":
            changes["labels"] = "some"
        if self.special in ("nan-input", "inf-input", "nan-padding") and family.task != "image":
            changes["embeds"] = True
        if self.special == "nan-padding" and changes.get("padding", self.padding) in ("none", "holes"):
            changes["special"] = "nan-input"
        if self.labels == "both" or self.place == "root":
            # the second loss of "both" is made from the logits, and a hook on the whole model writes to them
            changes["keep_logits"] = True
        if changes.get("program", self.program) == "scaler":
            changes["mode"] = "autocast-fp16"
        unpatched = self.between == "unpatch" or changes.get("program", self.program) == "unpatched-backward"
        if unpatched and self.checkpointing == "non-reentrant":
            # the recomputation would then run stock's code; torch notices the difference and raises an error
            changes["checkpointing"] = "reentrant"
        if changes.get("program", self.program) == "autocast-backward" and self.special.startswith("inf"):
            # of what is finite in stock's bf16 products and infinite in fp32, or the reverse, there is no rule
            changes["special"] = "none"
        if changes.get("program", self.program) == "threads":
            # both threads draw dropout masks from one generator, and the order of the draws is not defined
            changes.update(dropout=0.0, lora="plain" if self.lora == "dropout" else self.lora)
        return replace(self, **changes)

    def _for_between(self) -> dict[str, Any]:
        """What the fields have to be for what happens between forward and backward."""
        changes = {"program": "step", **BETWEEN[self.between].changes}
        if changes.get("lora") == "plain" and self.lora != "none":
            del changes["lora"]
        if self.between == "loss-attentions":
            changes["attention"] = "eager"
        return changes

    def _for_hook(self) -> dict[str, Any]:
        if self.hook == "none" and self.between == "remove-hooks":
            return {"hook": "replace"}
        if self.hook == "none":
            return {"place": "linear"} if self.between == "add-hooks" else {"place": "linear", "at": 0}
        return {}


def parse(text: str) -> Case:
    """The case that `str(case)` wrote. Raises ValueError for a field that does not exist."""
    kinds = {field.name: type(getattr(Case(), field.name)) for field in fields(Case)}
    values: dict[str, Any] = {}
    for part in text.split():
        if part == "-":
            continue
        name, _, value = part.partition("=")
        if name not in kinds:
            raise ValueError(f"unknown field {name!r} of a case; known: {', '.join(kinds)}")
        values[name] = value == "True" if kinds[name] is bool else kinds[name](value)
    return Case(**values)


def _weighted(weights: dict[Any, int]) -> st.SearchStrategy[Any]:
    return st.sampled_from([value for value, count in weights.items() for _ in range(count)])


def cases() -> st.SearchStrategy[Case]:
    """Cases drawn by the weights."""
    drawn = {name: _weighted(weights) for name, weights in WEIGHTS.items()}
    return st.builds(Case, **drawn, seed=st.integers(0, 10_000)).map(Case.tidy)
