"""What is held at the peak of a step, block by block, from the trace that torch's profiler exports."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

ENGINE = "autograd::engine::evaluate_function: "


@dataclass(frozen=True)
class Block:
    """Bytes that a step allocates on a CPU, and the ops in which it does so.

    `start` and `end` are numbers of allocator events; `end` is None if the step does not free them.
    """

    start: int
    end: int | None
    nbytes: int
    spans: tuple[str, ...]

    @property
    def maker(self) -> str:
        """The outermost op, without autograd's own, and the innermost one that is not an allocation."""
        names = [name.removeprefix(ENGINE) for name in self.spans if name.removeprefix("aten::") not in ALLOCATE]
        return " ".join(dict.fromkeys((names[0], names[-1].removeprefix("aten::")))) if names else "python"


ALLOCATE = ("empty", "empty_like", "empty_strided", "new_empty", "resize_", "to", "contiguous", "clone")


@dataclass(frozen=True)
class Peak:
    """The highest point of a step, in bytes above what was there before it.

    Args:
        kept: Made by the forward, and still held when backward began.
        working: All else that is held at the peak, the largest first.
        at_start: What was held when backward began.
        in_backward: Whether the peak is in backward.
    """

    kept: int
    working: tuple[Block, ...]
    at_start: int
    in_backward: bool

    @property
    def nbytes(self) -> int:
        return self.kept + sum(block.nbytes for block in self.working)


def peak_of(step: Callable[[], object]) -> Peak:
    """The peak of a step on a CPU: one forward and one backward, whose gradients exist already."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    blocks, began = _blocks(events)
    return _peak(blocks, began)


def _peak(blocks: list[Block], began: int) -> Peak:
    changes = sorted([(b.start, b.nbytes) for b in blocks] + [(b.end, -b.nbytes) for b in blocks if b.end is not None])
    held, highest, at = 0, 0, 0
    for when, nbytes in changes:
        held += nbytes
        if held > highest:
            highest, at = held, when

    def live(when: int) -> list[Block]:
        return [b for b in blocks if b.start <= when and (b.end is None or b.end > when)]

    kept = {id(b) for b in live(began)}
    working = sorted((b for b in live(at) if id(b) not in kept), key=lambda b: -b.nbytes)
    at_start = sum(b.nbytes for b in live(began))
    return Peak(highest - sum(b.nbytes for b in working), tuple(working), at_start, at > began)


def _blocks(events: list[dict[str, Any]]) -> tuple[list[Block], int]:
    """The blocks of a trace, and the number of the event before which backward began."""
    found: list[Block] = []
    live: dict[int, tuple[int, int, tuple[str, ...]]] = {}
    began, number = None, 0
    for number, (event, spans) in enumerate(_in_order(events)):
        if began is None and any(name.startswith(ENGINE) for name in spans):
            began = number - 1
        nbytes, address = event["args"]["Bytes"], event["args"]["Addr"]
        if nbytes > 0:
            live[address] = (number, nbytes, spans)
        elif address in live:
            start, size, made = live.pop(address)
            found.append(Block(start, number, size, made))
    found += [Block(start, None, size, made) for start, size, made in live.values()]
    return found, number if began is None else began


def _in_order(events: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """Each allocation and free with the names of the ops in which it happened, the outermost first."""
    ops = [event for event in events if event.get("cat") == "cpu_op"]
    memory = [event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0]
    ordered = sorted([*ops, *memory], key=lambda e: (e["ts"], e["args"]["Ev Idx"]))
    inside: list[dict[str, Any]] = []
    for event in ordered:
        inside = [op for op in inside if op["ts"] + op["dur"] > event["ts"]]
        if event["name"] == "[memory]":
            yield event, tuple(op["name"] for op in inside)
        else:
            inside.append(event)
