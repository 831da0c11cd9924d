"""The modes in which a patched model is compared with the stock one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mode:
    """One way to run a training step or an evaluation.

    Attributes:
        name: Its name in `--modes` and in the table.
        dtype: "fp32", "bf16" or "autocast" (bf16 autocast over fp32 weights).
        dropout: The probability that every dropout field of the config gets.
        padding: "" or the side on which rows are padded.
        labels: Whether the model computes its own loss; else the loss is a fixed function of all its float outputs.
        attention: The attention implementation asked for; "" is the model's default.
        asked: Forward arguments that ask for more outputs.
        checkpointing: "", "non-reentrant" or "reentrant".
        train: Train or eval mode.
        grad: Whether there is a backward.
    """

    name: str
    dtype: str = "fp32"
    dropout: float = 0.0
    padding: str = ""
    labels: bool = True
    attention: str = ""
    asked: tuple[str, ...] = ()
    checkpointing: str = ""
    train: bool = True
    grad: bool = True


MODES: tuple[Mode, ...] = (
    Mode("fp32"),
    Mode("bf16", dtype="bf16"),
    Mode("autocast", dtype="autocast"),
    Mode("dropout", dropout=0.1),
    Mode("pad-right", padding="right"),
    Mode("pad-left", padding="left"),
    Mode("no-labels", labels=False),
    Mode("hidden", labels=False, attention="eager", asked=("output_hidden_states", "output_attentions")),
    Mode("eager", attention="eager"),
    Mode("checkpoint", checkpointing="non-reentrant"),
    Mode("eval-grad", train=False),
    Mode("eval", train=False, grad=False),
    # this mode is last because some stock models run out of memory in it
    Mode("checkpoint-reentrant", checkpointing="reentrant"),
)
BY_NAME = {mode.name: mode for mode in MODES}
# the modes for a config with a flag changed from its default
FLAG_MODES = ("fp32", "bf16", "autocast", "pad-left", "eval")
