"""Scenarios of what users do with an adapter. Each function runs one scenario on one side."""

from __future__ import annotations

from collections.abc import Callable

from peft import PeftModel
from safetensors.torch import load_file

from .side import Side, disturb


def _adapted(side: Side) -> None:
    side.adapt(side.base())
    disturb(side.model)


def train(side: Side) -> None:
    """Two steps."""
    _adapted(side)
    side.train("step 1")
    side.train("step 2")


def second(side: Side) -> None:
    """After a step a second adapter is added and trained. Then the first one is used again, and the second deleted."""
    _adapted(side)
    side.train("before the second adapter")
    side.model.add_adapter("second", side.method.config(side.context))
    side.model.set_adapter("second")
    disturb(side.model, seed=3)
    side.model.train()
    side.train("second adapter")
    side.model.set_adapter("default")
    side.train("first adapter again")
    side.model.delete_adapter("second")
    side.train("second adapter deleted")


def disable(side: Side) -> None:
    """A forward without the adapter (as DPO's reference does), and a step with it."""
    _adapted(side)
    side.train("before")
    with side.model.disable_adapter():
        side.note("disabled", [("logits", side.model(**side.subject.batch()).logits)])
    side.train("after")


def merge(side: Side) -> None:
    """After a step the adapter is merged, unmerged and trained again."""
    _adapted(side)
    side.train("before the merge")
    side.model.merge_adapter()
    side.model.unmerge_adapter()
    side.train("merged and unmerged")


def merge_and_unload(side: Side) -> None:
    """The adapter is merged into the base model, and then the whole base model is trained."""
    _adapted(side)
    side.train("before the merge")
    side.model = side.model.merge_and_unload().train()
    side.note("merged", side.model.state_dict().items())
    side.model.requires_grad_(True)
    side.train("merged model", adapted=False)


def unload_and_add(side: Side) -> None:
    """The adapter is removed, and a new one of the same name is added."""
    _adapted(side)
    side.train("first adapter")
    layers = getattr(side.model.base_model, "unload", None)
    base = layers() if layers is not None else side.model.get_base_model()
    side.adapt(base)
    disturb(side.model, seed=4)
    side.train("the same name again")


def save_and_load(side: Side) -> None:
    """The adapter is saved, and loaded onto a new base model."""
    _adapted(side)
    side.train("before saving")
    folder = side.folder / "saved"
    side.model.save_pretrained(folder)
    for file in sorted(folder.rglob("*.safetensors")):
        side.note(f"saved {file.name}", load_file(file).items())
    side.ready(PeftModel.from_pretrained(side.base(), folder, is_trainable=True))
    side.train("loaded")


SCENARIOS: dict[str, Callable[[Side], None]] = {
    "train": train,
    "second adapter": second,
    "disable": disable,
    "merge and unmerge": merge,
    "merge and unload": merge_and_unload,
    "unload and add": unload_and_add,
    "save and load": save_and_load,
}
