"""The rows of an estimate are strategies: which of them fit, and the largest batch of each."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest

from hf_actcompress.cli.common import Exit
from hf_actcompress.cli.estimate_table import _largest
from hf_actcompress.cli.process import without_bitsandbytes
from hf_actcompress.cli.strategies import DEFAULT, Row, Strategy, chosen
from hf_actcompress.errors import UnknownOptionError
from hf_actcompress.memory import estimate
from hf_actcompress.quick.strategies import STRATEGIES, TIMES, recommended
from tests.cli.invoke import SIZES, run


def rows_of(**peaks: int):
    """Rows as if they had been estimated."""
    by_name = {strategy.name: strategy for strategy in DEFAULT}

    def rows(several, strategies, table):
        for name, peak in peaks.items():
            estimated = SimpleNamespace(device_bytes=peak, kept_bytes=peak // 2, notes=(), reserved_share=None)
            yield Row(by_name[name], estimated, {1: peak}, 1 if peak <= table.room else 0)

    return rows


@pytest.mark.parametrize(
    "preset, room, code, fitting",
    [
        ((), 99, Exit.DOES_NOT_FIT, "none of these"),
        ((), 100, Exit.OK, "stock"),
        (("exact",), 100, Exit.DOES_NOT_FIT, "stock"),
        (("exact",), 150, Exit.OK, "stock, exact"),
    ],
)
def test_what_fits_has_to_be_what_was_asked_for(model, monkeypatch, preset, room, code, fitting):
    """With tiny tensors a preset may need more than stock. That stock fits is then not enough for success."""
    # the attribute `hf_actcompress.cli.estimate` is the command, so the module is taken from sys.modules
    command = sys.modules["hf_actcompress.cli.estimate"]
    monkeypatch.setattr(command, "rows", rows_of(stock=100, exact=150))
    arguments = [part for name in preset for part in ("--preset", name)]
    result = run("estimate", model, *SIZES, "--gpu", f"{room}B", *arguments)
    assert result.exit_code == code
    # where nothing fits there is nothing to start with
    assert f"\nfits on {room}B: {fitting}\n" in result.stdout
    assert ("\nrecommended: " in result.stdout) == (room >= 100 and fitting != "none of these")


def test_strategies_are_of_known_classes():
    for strategy in chosen([]):
        assert strategy.time in TIMES and strategy.known == STRATEGIES[strategy.name]
    by_name = {strategy.name: strategy for strategy in DEFAULT}
    assert (by_name["stock"].time, by_name["exact"].time, by_name["offload"].time) == ("none", "low", "transfer")
    assert by_name["int8"].gradients == "lossy 8 bits" and by_name["offload"].gradients == "exact"
    assert Strategy("pooled", "pooled").gradients == "lossy"
    with pytest.raises(UnknownOptionError, match="int9"):
        chosen(["int9"])


@pytest.mark.parametrize("start", (1, 16, 500))
@pytest.mark.parametrize("room", (105, 199, 1000, 6543))
@pytest.mark.parametrize("guess", (None, 1, 16, 130, 2000))
def test_the_largest_batch_is_the_largest(start, room, guess):
    def peak(batch_size):
        # a linear function with small deviations, as an allocator's rounding makes them
        return 100 + 7 * batch_size + batch_size % 3

    peaks = {start: peak(start)}
    largest = _largest(peaks, room, 100, peak, guess)
    assert largest == max((size for size in range(1, 2000) if peak(size) <= room), default=0)
    assert all(peaks[size] == peak(size) for size in peaks) and len(peaks) <= 8


def test_stock_may_be_asked_for_by_name(model):
    """It is the only row then, and decides whether the training fits."""
    needed = estimate(model, batch_size=2, seq_len=16, config=None).device_bytes
    fits, too_small = (run("estimate", model, *SIZES, "--preset", "stock", "--gpu", f"{n}B") for n in (2 * needed, 1))
    assert (fits.exit_code, too_small.exit_code) == (Exit.OK, Exit.DOES_NOT_FIT)
    assert [line.split()[0] for line in fits.stdout.splitlines()[2:3]] == ["stock"]
    assert "exact  " not in fits.stdout


def test_peft_finds_no_bitsandbytes_for_an_estimate_and_finds_it_again_afterwards(monkeypatch):
    pytest.importorskip("bitsandbytes")
    available = pytest.importorskip("peft.import_utils").is_bnb_available
    monkeypatch.delitem(sys.modules, "bitsandbytes")
    # where diffusers has asked for it already, it is not hidden
    monkeypatch.delitem(sys.modules, "diffusers", raising=False)
    available.cache_clear()
    with without_bitsandbytes():
        assert not available()
        with pytest.raises(ImportError):
            importlib.import_module("bitsandbytes")
    assert available() and "bitsandbytes" not in sys.modules
    monkeypatch.setitem(sys.modules, "bitsandbytes", loaded := SimpleNamespace())
    with without_bitsandbytes():
        # what is there already is no cost
        assert sys.modules["bitsandbytes"] is loaded


def test_the_row_to_start_with():
    """Exact before lossy, roomy before tight, and then the one that takes the least time."""

    def first(**verdicts: str) -> str | None:
        return recommended((name, STRATEGIES[name.replace("_", " ")], fits) for name, fits in verdicts.items())

    assert first(stock="yes", exact="yes", int8="yes") == "stock"
    assert first(stock="no", checkpointing="yes", exact="yes", long="yes", offload="yes") == "exact"
    assert first(exact="tight", long="yes", checkpointing="yes", int8="yes") == "long"
    assert first(exact="no", offload="tight", int8="yes") == "offload"
    assert first(exact="no", int8="yes", int4="yes") == "int8"
    assert first(stock="no", exact="no") is None
