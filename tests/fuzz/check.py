"""Check one case, and reduce a failing case to the simplest one that fails in the same way."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointError

from hf_actcompress.errors import ActCompressError, PaddingError
from hf_actcompress.records import clear, live_entries
from tests.fuzz.between import BETWEEN
from tests.fuzz.case import Case
from tests.fuzz.compare import ABOVE_LAW, Failure, compare, may_refuse, relative
from tests.fuzz.models import config_of, plainest
from tests.fuzz.programs import Seen, run_program

Result = Sequence[Seen] | Exception
# the beginnings of rules on forward values
FORWARD = ("forward", "missing forward", "extra forward", "NaN in forward")
# parts of messages with which we may refuse what stock does
ALLOWED: tuple[str, ...] = ("an adapter was merged into",)


def check(case: Case) -> list[Failure]:
    """The rules that the case breaks; none if both sides agree, or raise the same type of error."""
    clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = _outcome(case, "ours")
        failures = _judge(case, ours)
    if isinstance(ours, Exception):
        # after a failed backward, torch's engine keeps its queue until the next backward, in stock too
        torch.zeros(1, requires_grad=True).sum().backward()
    if live_entries() and not _stock_leaks(case):
        failures.append(Failure("registry not empty", f"{live_entries()} entries"))
    return failures


def _stock_leaks(case: Case) -> bool:
    """Whether tensors of a graph stay alive behind stock's run, too, as behind a partial backward of a checkpoint."""
    before = _alive()
    _outcome(case, "stock")
    return _alive() > before


def _alive() -> int:
    gc.collect()
    return sum(isinstance(x, torch.Tensor) and x.grad_fn is not None for x in gc.get_objects())


def _outcome(case: Case, side: str) -> Result:
    try:
        return run_program(case, side)
    except Exception as error:  # any error is compared with the other side's
        # the frames of the traceback would keep the models alive
        return error.with_traceback(None)


def _references(case: Case) -> Iterator[Case]:
    """The cases whose stock gradients are right.

    A checkpointed layer of stock runs again in backward, with what its modules are by then, and with its hooks once
    more. So the same without checkpointing is right, too.
    """
    yield case
    if case.checkpointing != "none" and (case.between, case.hook) != ("nothing", "none"):
        yield replace(case, checkpointing="none")


def _judge(case: Case, ours: Result) -> list[Failure]:
    """The rules that ours breaks against the last reference, if it breaks some against each."""
    found = [_judge_against(reference, case, ours) for reference in _references(case)]
    if any(failure.rule.startswith(FORWARD) for failure in found[0]):
        return found[0]
    # T5's forward differs by roundings if it is checkpointed, in stock too
    found[1:] = [[f for f in failures if not f.rule.startswith(FORWARD)] for failures in found[1:]]
    if not all(found):
        return []
    if case.between == "to" and (isinstance(ours, Exception) or (_difference(case, ours) or 0.0) <= ROUNDED):
        # stock mixes dtypes then: it raises, or reads some weights of before and some that were rounded in between
        return []
    return [replace(failure, detail=failure.detail + _remark(case, ours)) for failure in found[-1]]


# of gradients that ours computes where stock raises
RIGHT = "ours are right; "


def _right_anyway(reference: Case, case: Case, ours: Sequence[Seen]) -> str:
    """Whether ours are right where stock raises because of a write in place.

    Torch can go on after such a write if it copies what was saved before it is written to.
    """
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        stock = _outcome(reference, "stock")
    oracle = _oracle(reference)
    if isinstance(stock, Exception):
        return ""
    # the forward is left out: torch's copies may have other strides, and so other roundings
    sides = [[seen for seen in side if seen.kind == "gradient"] for side in (ours, stock)]
    failures = compare(case, *sides, lambda: oracle)
    return f"ours are wrong: {failures[0].detail}; " if failures else RIGHT


# the relative difference that weights of a narrower dtype make
ROUNDED = 0.02


def _remark(case: Case, ours: Result) -> str:
    """How far ours are from the gradients with nothing in between. It helps to find the reason."""
    found = _difference(case, ours)
    return "" if found is None else f"; the difference to the gradients with nothing in between is {found:.3g}"


def _difference(case: Case, ours: Result) -> float | None:
    """The relative difference to the gradients with nothing in between: stock's, or ours if the preset is lossy. None
    if these are other gradients."""
    if BETWEEN[case.between].then is BETWEEN["nothing"].then or isinstance(ours, Exception):
        return None
    plain = _outcome(replace(case, between="nothing"), "stock" if config_of(case).lossless else "ours")
    gradients = [seen for seen in ours if seen.kind == "gradient"]
    if isinstance(plain, Exception) or not gradients:
        return None
    theirs = {(seen.stage, seen.name): seen.value for seen in plain if seen.kind == "gradient"}
    pairs = [(seen.value, theirs.get((seen.stage, seen.name))) for seen in gradients]
    known = [(a, b) for a, b in pairs if b is not None]
    return None if len(known) < len(theirs) else relative(known)


def _judge_against(reference: Case, case: Case, ours: Result) -> list[Failure]:
    stock = _outcome(reference, "stock")
    if isinstance(stock, Exception):
        if isinstance(ours, Exception):
            changed = (case.between, case.hook) != ("nothing", "none")
            same = type(ours) is type(stock) or may_refuse(case) or (changed and isinstance(ours, RuntimeError))
            return [] if same else [Failure(f"another error: {_short(ours)}", f"stock: {_short(stock)}")]
        remark = _right_anyway(reference, case, ours)
        # what is recomputed is right after a write that stock's saved tensors do not allow
        right = remark == RIGHT or case.program == "autocast-backward"
        return [] if right else [Failure(f"only stock raises: {_short(stock)}", remark + _line(stock))]
    if isinstance(ours, PaddingError) and may_refuse(case):
        return []
    if isinstance(ours, Exception) and any(text in str(ours) for text in ALLOWED):
        return []
    if isinstance(ours, CheckpointError) and case.between == "attention":
        # the second run calls another attention, which saves other tensors, and torch says so
        return []
    if isinstance(ours, RuntimeError) and _casts_again(case) and "modified by an inplace operation" in str(ours):
        return []
    if isinstance(ours, ActCompressError):
        return [Failure(f"refused: {_short(ours)}", _line(ours))]
    if isinstance(ours, Exception):
        return [Failure(f"crash: {_short(ours)}", _line(ours))]
    failures = compare(case, ours, stock, lambda: _oracle(case))
    return [failure for failure in failures if failure.rule != ABOVE_LAW or _is_confirmed(reference, case)]


def _casts_again(case: Case) -> bool:
    """Whether weights were written to that ours casts again in backward. Stock has kept casts of what they were."""
    return case.mode.startswith("autocast") and case.between.startswith("optimizer-step")


def _is_confirmed(reference: Case, case: Case) -> bool:
    """Whether the same case is above the law with other seeds too.

    The two errors come from different roundings of the same size. With only two tokens in a batch, one error may be
    three times the other by chance.
    """
    again = 0
    for seed in range(case.seed + 1, case.seed + 7):
        other = replace(case, seed=seed)
        stock, ours = _outcome(replace(reference, seed=seed), "stock"), _outcome(other, "ours")
        if isinstance(stock, Exception) or isinstance(ours, Exception):
            continue
        failures = compare(other, ours, stock, partial(_oracle, other))
        again += any(failure.rule == ABOVE_LAW for failure in failures)
    return again > 1


def _oracle(case: Case) -> Sequence[Seen] | None:
    found = _outcome(case, "oracle")
    if isinstance(found, RuntimeError):
        # fp64 has no cast whose copy shields a saved tensor from a hook that writes in place
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            found = _outcome(case, "oracle")
    return None if isinstance(found, Exception) else found


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _short(error: Exception) -> str:
    """The type and the message without what differs from case to case."""
    return f"{type(error).__name__}: {re.sub(r'[0-9]+', '#', str(error).splitlines()[0] if str(error) else '')[:90]}"


def reduce(case: Case, failures: Sequence[Failure], attempts: int = 120) -> Case:
    """The simplest case that still breaks one of these rules: a field gets its default if the case then still fails."""
    rules = {failure.rule for failure in failures}

    def fails(other: Case) -> bool:
        return bool(rules & {failure.rule for failure in check(other)})

    return reduce_by(case, plainest(case), fails, attempts)


def reduce_by(case: Case, plain: Case, fails: Callable[[Case], bool], attempts: int) -> Case:
    """Give each field of `case` the value of `plain` as long as it still `fails`."""
    changed = True
    while changed:
        changed = False
        for field in fields(Case):
            value: Any = getattr(plain, field.name)
            candidate = replace(case, **{field.name: value}).tidy()
            if candidate == case or attempts <= 0:
                continue
            attempts -= 1
            # `tidy` may undo the change; taking such a candidate would make the loop endless
            if getattr(candidate, field.name) == value and fails(candidate):
                case, changed = candidate, True
    return case


def prepare() -> None:
    """Use one thread, so that sums are the same on every machine, and keep imported objects out of collections."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
