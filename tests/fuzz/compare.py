"""The rules by which our side of a case is compared with stock's.

Forward values are bit-equal under every preset, with NaN at the same positions. Only the loss may differ by a few
roundings, if the logits are never whole.

Gradients under a lossless config are bit-equal in the family's `bit_equal` modes without the loss head. Elsewhere, for
each backward and over all parameters, ||ours - oracle|| <= LAW ||stock - oracle||, with an fp64 oracle that has the
same dropout masks; or ||ours - stock|| is at most one rounding of ||stock||.

Gradients under a lossy preset: ||ours - stock|| <= BOUNDS[preset] ||stock||, and ours are finite where stock's are.

In all cases the same parameters have gradients, of the same dtype and shape, and ours are not finite where stock's are
not. With a loss head or a lossy preset it is enough that some are not finite: a GradScaler needs to find only one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.families import BY_NAME
from tests.fuzz.case import Case
from tests.fuzz.families import FUZZED, NO_ATTENTION
from tests.fuzz.models import batch_of, config_of
from tests.fuzz.programs import Seen

# the law is 1.1 over many batches (tests/models/test_families.py). The ratio of one tiny batch scatters: a case above
# this limit is repeated with other seeds (tests/fuzz/check.py)
LAW = 2.0
# by how many roundings the loss, the longest sum in a model, may differ if it is summed in pieces
LOSS_ROUNDINGS = 8
EPS = {
    "fp32": torch.finfo(torch.float32).eps,
    "bf16": torch.finfo(torch.bfloat16).eps,
    "fp16": torch.finfo(torch.float16).eps,
    "autocast": torch.finfo(torch.bfloat16).eps,
    "autocast-fp16": torch.finfo(torch.float16).eps,
}
# about four times the errors of the presets on tiny models with random weights; inf: only finiteness is checked
BOUNDS: dict[str, float] = {
    "int8": 0.15, "int4": 1.0, "adaptive": 1.0, "fp8": 0.4, "tempo": 0.2, "inverted": 0.2, "fewbit": 1.0,
    "forward_ad": 0.2, "dropit": 5.0, "blocksparse": 5.0, "pooled": float("inf"), "sampled": float("inf"),
    "wtacrs": float("inf"),
}  # fmt: skip
# for presets with a small bound: the largest error of one parameter's gradient, and from which share of the norm of all
# gradients on it is looked at
WRONG, WRONG_FROM = 0.3, 0.03
ABOVE_LAW = "gradient error above the law"
SCALE = "scale differs: scale"
# a limit for cases without an oracle, in roundings
CHECKPOINTED = 16
HIDDEN = "gradient finite where stock's is not"
Oracle = Callable[[], Sequence[Seen] | None]


@dataclass(frozen=True)
class Failure:
    """One broken rule. `rule` is the class that the summary counts by, `detail` what was found."""

    rule: str
    detail: str


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal values of one dtype, NaN equal to NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(((a == b) | (a.isnan() & b.isnan())).all()) if a.is_floating_point() else torch.equal(a, b)


def compare(case: Case, ours: Sequence[Seen], stock: Sequence[Seen], oracle: Oracle) -> list[Failure]:
    """Every rule that `ours` breaks."""
    failures = _same_things(case, ours, stock)
    if failures:
        return failures
    theirs = _by_name(stock)
    for seen in ours:
        if seen.kind != "gradient":
            failures += _compare_value(case, seen, theirs[_key(seen)])
    stages = dict.fromkeys(seen.stage for seen in ours if seen.kind == "gradient")
    for stage in stages:
        pairs = [(seen, theirs[_key(seen)]) for seen in ours if seen.kind == "gradient" and seen.stage == stage]
        failures += _compare_gradients(case, pairs, oracle)
    if _may_hide(case, stock) and any(failure.rule == HIDDEN for failure in failures):
        # a GradScaler changes its scale when it finds NaN or inf, so the scale may differ, too
        failures = [failure for failure in failures if failure.rule not in (HIDDEN, SCALE)]
    return failures


def _may_hide(case: Case, stock: Sequence[Seen]) -> bool:
    """Whether a gradient of ours may be finite where stock's is not.

    It may if NaN or inf is in a row without a target: stock computes 0 * NaN, while the loss head does not read such a
    row. It may also if fp16 overflows: the values that a lossy codec returns may be just small enough.
    """
    overflow = case.special == "large-weight" and not config_of(case).lossless
    return overflow or (case.loss_head and not _poisoned(case, stock))


def _poisoned(case: Case, stock: Sequence[Seen]) -> bool:
    """Whether a loss is NaN or inf for another reason than that no row has a target."""
    losses = [seen.value for seen in stock if seen.name == "loss"]
    targets = [_has_target(case, index) for index in (0, 1)]
    return all(targets) and not all(bool(loss.isfinite()) for loss in losses)


def _has_target(case: Case, index: int) -> bool:
    """Whether any row of a batch enters the loss."""
    labels = batch_of(case, "stock", index).get("labels")
    if labels is None:
        return True
    # a causal model does not predict the first token
    labels = labels[:, 1:] if FUZZED[case.family].task == "causal" else labels
    return bool((labels != -100).any())


def may_refuse(case: Case) -> bool:
    """Whether a gradient may reach a padding row, which `drop_padding=True` is documented to refuse."""
    reaches = case.labels in ("none", "both") or case.between.startswith("loss-") or case.family in NO_ATTENTION
    return case.drop_padding and case.padding != "none" and reaches


def _key(seen: Seen) -> tuple[str, str, str]:
    return (seen.kind, seen.stage, seen.name)


def _by_name(seen: Sequence[Seen]) -> dict[tuple[str, str, str], Tensor]:
    return {_key(s): s.value for s in seen}


def _same_things(case: Case, ours: Sequence[Seen], stock: Sequence[Seen]) -> list[Failure]:
    a, b = _by_name(ours), _by_name(stock)
    missing = [k for k in b if k not in a]
    extra = [k for k in a if k not in b]
    failures = []
    if missing:
        failures.append(Failure(f"missing {missing[0][0]}", f"{len(missing)}, e.g. {missing[0]}"))
    if extra:
        failures.append(Failure(f"extra {extra[0][0]}", f"{len(extra)}, e.g. {extra[0]}"))
    for key in a.keys() & b.keys():
        if a[key].dtype != b[key].dtype or a[key].shape != b[key].shape:
            what = f"{a[key].dtype} {tuple(a[key].shape)}, stock {b[key].dtype} {tuple(b[key].shape)}"
            failures.append(Failure(f"dtype or shape of a {key[0]}", f"{key[1]} {key[2]}: {what}"))
    return failures[:1]


def _compare_value(case: Case, seen: Seen, stock: Tensor) -> list[Failure]:
    if same_bits(seen.value, stock):
        return []
    detail = f"{seen.stage} {seen.name}: {_difference(seen.value, stock)}"
    if not torch.equal(seen.value.isnan(), stock.isnan()):
        return [Failure(f"NaN in {seen.kind} {seen.name.split()[0]}", detail)]
    if seen.name == "loss" and not case.keep_logits and case.loss_head:
        eps = torch.finfo(stock.dtype).eps
        if torch.allclose(seen.value, stock, rtol=LOSS_ROUNDINGS * eps, atol=LOSS_ROUNDINGS * eps):
            return []
    return [Failure(f"{seen.kind} differs: {seen.name.split()[0]}", detail)]


def _difference(a: Tensor, b: Tensor) -> str:
    if a.numel() == 1:
        return f"{a.item():.9g}, stock {b.item():.9g}"
    wrong = int((~((a == b) | (a.isnan() & b.isnan()))).sum())
    largest = (a.double() - b.double()).abs().nan_to_num(0.0, posinf=float("inf")).max()
    return f"{wrong} of {a.numel()} elements, by up to {largest:.3g} of {b.double().abs().nan_to_num(0.0).max():.3g}"


def _compare_gradients(case: Case, pairs: list[tuple[Seen, Tensor]], oracle: Oracle) -> list[Failure]:
    differing = [(seen, stock) for seen, stock in pairs if not same_bits(seen.value, stock)]
    if not differing:
        return []
    failures = _compare_finiteness(case, pairs)
    if failures:
        return failures
    if may_refuse(case) and not all(bool(stock.isfinite().all()) for _, stock in pairs):
        # a gradient with NaN or inf that reaches padding is not refused, because loss scaling skips such a step anyway
        return []
    if not config_of(case).lossless:
        return _within_bound(case, pairs)
    if must_be_bit_equal(case):
        seen, stock = differing[0]
        detail = f"{len(differing)} of {len(pairs)}, e.g. {seen.stage} {seen.name}: {_difference(seen.value, stock)}"
        return [Failure("gradient not bit-equal", detail)]
    return _within_law(case, pairs, oracle)


def _compare_finiteness(case: Case, pairs: list[tuple[Seen, Tensor]]) -> list[Failure]:
    # elements of a codec's group share a range, and the loss head skips rows without a target. So NaN or inf may be at
    # other elements than in stock, but if stock has any, ours must have some
    elsewhere = case.loss_head or not config_of(case).lossless
    ours_any = any(not bool(seen.value.isfinite().all()) for seen, _ in pairs)
    stock_any = any(not bool(stock.isfinite().all()) for _, stock in pairs)
    for seen, stock in pairs:
        ours_wrong = ~seen.value.isfinite() & stock.isfinite()
        stock_wrong = seen.value.isfinite() & ~stock.isfinite()
        if elsewhere and stock_any and ours_any:
            continue
        if bool(ours_wrong.any()):
            return [Failure("gradient not finite", f"{seen.stage} {seen.name}: {int(ours_wrong.sum())} elements")]
        if bool(stock_wrong.any()):
            detail = f"{seen.stage} {seen.name}: {int(stock_wrong.sum())} of {stock.numel()} elements"
            return [Failure(HIDDEN, detail)]
    return []


def must_be_bit_equal(case: Case) -> bool:
    """Whether the family's row promises bit-equal gradients in the case's mode.

    It does not if sums are taken in another order: with adapters, with reentrant checkpointing (each region runs a
    backward of its own), in a backward under another autocast, or in ModernBERT's local attention with our op.
    """
    family = BY_NAME.get(case.family)
    if family is None or (case.loss_head and case.labels != "none") or case.program == "autocast-backward":
        return False
    if case.lora != "none" or case.checkpointing == "reentrant":
        return False
    if case.family == "modernbert" and (case.preset != "exact" or case.drop_padding):
        return False
    mode = {"fp16": "bf16", "autocast-fp16": "autocast"}.get(case.mode, case.mode)
    return mode in family.bit_equal and config_of(case).activation_variant == "input"


def relative(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """||a - b|| / ||b|| over all pairs and the elements that are finite on both sides."""
    error = size = 0.0
    for a, b in pairs:
        both = a.isfinite() & b.isfinite()
        error += float((a.double() - b.double())[both].square().sum())
        size += float(b.double()[both].square().sum())
    if error == 0.0:
        return 0.0
    return (error / size) ** 0.5 if size > 0 else float("inf")


def _within_bound(case: Case, pairs: list[tuple[Seen, Tensor]]) -> list[Failure]:
    # a matrix multiplied by 500 saturates the ops behind it; then a small error can change whole rows
    bound = BOUNDS[case.preset] if case.special != "large-weight" else float("inf")
    if case.lora != "none" and case.checkpointing != "none" and config_of(case).checkpoint_input != "identity":
        # only adapters are trained, and their layer is recomputed from a rounded input: with int8 the error is
        # 0.35 for one of 20 seeds
        bound *= 4
    error = relative([(seen.value, stock) for seen, stock in pairs])
    if error <= bound:
        return _wrong_parameter(case, pairs, WRONG * bound / BOUNDS[case.preset])
    return [Failure(f"error of {case.preset} above its bound", f"{pairs[0][0].stage}: {error:.3g} > {bound}")]


def _wrong_parameter(case: Case, pairs: list[tuple[Seen, Tensor]], limit: float) -> list[Failure]:
    """A gradient that is another one, and not only less precise, although the error of all together is small.

    Parameters with little gradient are left out: theirs is mostly rounding.
    """
    if BOUNDS[case.preset] > 0.2 or case.special != "none":
        return []
    whole = sum(float(stock.double().square().sum()) for _, stock in pairs) ** 0.5
    for seen, stock in pairs:
        if float(stock.double().norm()) < WRONG_FROM * whole:
            continue
        error = relative([(seen.value, stock)])
        if error > limit:
            return [Failure(f"another gradient under {case.preset}", f"{seen.stage} {seen.name}: error {error:.3g}")]
    return []


def _within_law(case: Case, pairs: list[tuple[Seen, Tensor]], oracle: Oracle) -> list[Failure]:
    error = relative([(seen.value, stock) for seen, stock in pairs])
    if error <= EPS[case.mode]:
        return []
    truth = _by_name(oracle() or ())
    found = [(seen.value, stock, truth[_key(seen)]) for seen, stock in pairs if _key(seen) in truth]
    if len(found) < len(pairs):
        if case.checkpointing != "none" and error <= CHECKPOINTED * EPS[case.mode]:
            # a checkpointed layer of stock runs again with what its modules are by then; the oracle's does not
            return []
        return [Failure("no oracle", f"error against stock {error:.3g}")]
    # an element counts only if all three values are finite
    finite = [(a, b, t, a.isfinite() & b.isfinite() & t.isfinite()) for a, b, t in found]
    own = relative([(b[at], t[at]) for _, b, t, at in finite])
    ours = relative([(a[at], t[at]) for a, _, t, at in finite])
    if ours <= LAW * own:
        return []
    detail = f"{pairs[0][0].stage}: error {ours:.3g} against the oracle, stock's own {own:.3g}, difference {error:.3g}"
    return [Failure(ABOVE_LAW, detail)]
