"""What estimate says of a model's memory: as text, as JSON, on a page."""

from __future__ import annotations

import gc
import itertools
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from hf_actcompress.cli import estimate as estimate_command
from hf_actcompress.cli.common import Exit
from hf_actcompress.cli.remedies import remedies
from hf_actcompress.cli.strategies import DEFAULT
from hf_actcompress.memory import estimate
from tests.cli.conftest import CONFIG
from tests.cli.invoke import SIZES, run, unwrapped


def test_estimate_prints_plain_text_and_says_what_fits(model):
    needed = estimate(model, **{"batch_size": 2, "seq_len": 16}).device_bytes
    result = run("estimate", model, *SIZES, "--preset", "exact", "--gpu", f"{needed}B")
    assert result.exit_code == Exit.OK, result.output
    lines = result.stdout.splitlines()
    assert lines[1].split("  ")[0] == "strategy" and "largest" in lines[0] and "MiB" in lines[1]
    cells = {re.split(r"\s{2,}", line)[0]: re.split(r"\s{2,}", line) for line in lines[2:4]}
    # to the byte, which leaves nothing for fragmentation
    assert cells["exact"][3:] == ["tight", "2", "low", "exact"] and "expandable_segments" in result.stdout
    assert cells["stock"][3] == "no" and int(cells["stock"][4]) < 2
    assert lines[-4:-2] == [f"fits on {needed}B: exact", "recommended: exact (gradients exact, extra time low)"]
    assert 'patch_model(model, "exact")' in lines[-1] and max(map(len, lines)) <= 80
    assumed = " ".join(" ".join(lines[lines.index("") + 1 :]).split())
    assert "assumed: batch 2 x 16" in assumed and "weights bfloat16" in assumed and "adamw" in assumed
    assert "\x1b" not in result.stdout


def test_an_estimate_computes_with_one_thread_and_no_collections(model, monkeypatch):
    """Threads that wait for small probes take more time than the estimate; afterwards the process has its own again."""
    threads: list[int] = []
    stock = estimate_command.rows
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)

    monkeypatch.setattr(estimate_command, "rows", lambda *args: threads.append(-gc.isenabled()) or stock(*args))
    assert run("estimate", model, *SIZES, "--preset", "exact").exit_code == Exit.OK
    assert threads == [1, 0, 7] and gc.isenabled()


def test_json_has_both_shares_of_every_row(model):
    """Text shows that of expandable segments for a tight row only, so that it is replayed for that row only."""
    asked = ("estimate", model, *SIZES, "--preset", "exact", "--gpu")
    needed = estimate(model, config="exact", **{"batch_size": 2, "seq_len": 16}).device_bytes
    found = json.loads(run(*asked, f"{needed * 101 // 100}B", "--json").stdout)["rows"][1]
    shares = [found["estimate"][name] for name in ("reserved_share", "reserved_share_expandable")]
    alone = estimate(model, config="exact", **{"batch_size": 2, "seq_len": 16})
    assert shares == [alone.reserved_share, alone.reserved_share_expandable] and None not in shares


@pytest.mark.daily(3)
def test_an_estimate_of_compiled_models(model):
    result = run("estimate", model, *SIZES, "--preset", "exact", "--engine", "compile", "--json")
    assert result.exit_code == Exit.OK, result.output
    kept = {row["preset"]: row["estimate"]["kept_bytes"] for row in json.loads(result.stdout)["rows"]}
    assert kept["exact"] == estimate(model, batch_size=2, seq_len=16, engine="compile").kept_bytes < kept[None]
    assert run("estimate", model, *SIZES, "--engine", "jit").exit_code == Exit.USAGE


def test_an_estimate_with_the_head_of_trl(model):
    kept = {}
    for flags in ((), ("--trl",)):
        result = run("estimate", model, *SIZES, "--preset", "exact", *flags, "--json")
        assert result.exit_code == Exit.OK, result.output
        found = json.loads(result.stdout)
        kept[flags] = found["rows"][0]["estimate"]["kept_bytes"]
        assert ("TRL's fused head" in found["assumed"]) == bool(flags)
    assert kept["--trl",] < kept[()]


def test_an_estimate_of_one_process_of_several(model):
    sizes = {}
    for ranks in ("1", "4"):
        result = run("estimate", model, *SIZES, "--preset", "exact", "--fsdp", ranks, "--json")
        assert result.exit_code == Exit.OK, result.output
        found = json.loads(result.stdout)
        sizes[ranks] = found["rows"][1]["estimate"]["weights_bytes"]
    assert sizes["4"] < 0.5 * sizes["1"] and "one of 4 processes under FSDP2" in found["assumed"]
    result = run("estimate", model, *SIZES, "--preset", "exact", "--zero", "3", "--processes", "4")
    assert result.exit_code == Exit.OK, result.output
    said = " ".join(result.stdout.split())
    assert "one of 4 under ZeRO-3" in said and "not measured" in said
    result = run("estimate", model, *SIZES, "--preset", "exact", "--processes", "4")
    said = " ".join(result.stdout.split())
    assert "one of 4 under DDP" in said and "second copy of all gradients" in said, result.output
    for wrong in (
        ("--zero", "3"),
        ("--processes", "4", "--fsdp", "4"),
        ("--zero", "2", "--processes", "4", "--fsdp", "4"),
    ):
        assert run("estimate", model, *SIZES, *wrong).exit_code == Exit.USAGE
    assert run("estimate", model, *SIZES, "--zero", "2", "--processes", "2", "--quick").exit_code == Exit.USAGE
    assert run("estimate", model, *SIZES, "--fsdp", "2", "--quick").exit_code == Exit.USAGE
    assert run("estimate", model, *SIZES, "--target-len", "4").exit_code == Exit.NO_MODEL


def test_the_longest_sequences_and_an_evaluation(model):
    room = estimate(model, batch_size=2, seq_len=96).device_bytes
    arguments = ("--batch-size", "2", "--seq-len", "64", "--preset", "exact", "--max-context")
    data = json.loads(run("estimate", model, *arguments, "--gpu", f"{room}B", "--json").stdout)
    longest = data["rows"][1]["longest_sequences"]
    # a multiple of 64 up to the 128 positions of the model
    assert longest == 64
    assert estimate(model, batch_size=2, seq_len=128).device_bytes > room
    stock = estimate(model, batch_size=2, seq_len=64, config="stock")
    assert stock.device_bytes - stock.step_peak_bytes < data["evaluation_bytes"] < stock.device_bytes
    table = run("estimate", model, *arguments, "--gpu", "22GiB").stdout.splitlines()
    assert "most" in table[0] and "tokens" in table[1] and " 128 " in table[2]
    result = run("estimate", model, *arguments)
    assert result.exit_code == Exit.USAGE and "--gpu" in result.stderr


def test_where_nothing_fits_it_says_what_would(model):
    from hf_actcompress.memory.estimation.states.held import CONTEXT_BYTES

    lora = estimate(model, batch_size=1, seq_len=16, gradient_checkpointing=True, lora=True, quantization="nf4")
    result = run("estimate", model, *SIZES, "--preset", "exact", "--gpu", f"{lora.device_bytes}B")
    assert result.exit_code == Exit.DOES_NOT_FIT
    changes = {
        line.split(",")[0].strip(): line.rsplit(", ", 1)[1] for line in unwrapped(result.stdout).splitlines()[-5:]
    }
    assert list(changes)[0].startswith("a batch of 1") and changes["QLoRA and a batch of 1"] == "would fit"
    assert "would not fit" in changes.values()
    data = json.loads(run("estimate", model, *SIZES, "--gpu", f"{CONTEXT_BYTES}B", "--lora", "--json").stdout)
    assert [remedy["fits"] for remedy in data["remedies"]] == [False] * 3


def test_gradient_checkpointing_is_offered_where_it_alone_is_enough(model):
    """First of all remedies, because it is a switch and no other training; to the byte."""
    from hf_actcompress.cli.estimate_table import EstimateTable
    from hf_actcompress.cli.estimate_text import explanation
    from hf_actcompress.memory.estimation.estimates import Estimates
    from hf_actcompress.quick.sizes import readable_size

    several, options = Estimates(model), {"optimizer": "adamw"}
    alone, both = (several.device_bytes(8, 128, config, True) for config in (None, "exact"))
    assert both < alone < several.device_bytes(8, 128, "exact")

    def offered(room, *shown):
        found = remedies(several, room, 8, 128, options, ("stock", *shown))
        return [(remedy.strategy, remedy.nbytes, remedy.fits) for remedy in itertools.islice(found, 2)]

    pair = [("checkpointing", alone, True), ("exact + checkpointing", both, True)]
    assert offered(alone, "exact") == pair
    assert offered(alone - 1, "exact")[0] == pair[1] and pair[0] not in offered(alone - 1)
    # a row of the table is not offered again, and nothing is that is too large
    assert offered(alone, "checkpointing")[0] == pair[1]
    for others in (offered(both - 1), offered(alone, *(strategy.name for strategy in DEFAULT))):
        assert not set(pair) & set(others)
    first = next(remedies(several, alone, 8, 128, options, ("stock", "exact")))
    asked = model, 8, 128, options, alone, "this card", False, (), (), False, False
    lines = explanation(EstimateTable(*asked, instead=[first])).splitlines()
    assert lines[-1] == f"  gradient checkpointing alone, checkpointing: {readable_size(alone)}, would fit"


def test_remedies_that_the_model_cannot_have_are_left_out(tmp_path):
    """peft has no LoRA for a Mamba."""
    path = tmp_path / "mamba.json"
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "dtype": "bfloat16"}
    path.write_text(json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"], **sizes}))
    result = run("estimate", str(path), *SIZES, "--preset", "exact", "--gpu", "1MiB")
    assert result.exit_code == Exit.DOES_NOT_FIT, result.output
    assert "LoRA" not in result.stdout and "adamw_8bit" in result.stdout


def test_where_nothing_fits_the_formula_says_what_would():
    """It offers the changes of the whole estimate. Their bytes are what the formula says with that option."""
    path = str(Path(__file__).parents[2] / "recipes/configs/llama-1b.json")
    command = ("estimate", path, "--quick", "--batch-size", "2", "--json")
    result = run(*command, "--gpu", "6GiB")
    assert result.exit_code == Exit.DOES_NOT_FIT
    found = {remedy["name"]: remedy for remedy in json.loads(result.stdout)["remedies"]}
    assert list(found)[:2] == [
        "a batch of 1 (--batch-size 1)",
        "an 8-bit optimizer (--optim adamw_8bit)",
    ]
    assert found["QLoRA (--qlora)"]["fits"] and not found["a batch of 1 (--batch-size 1)"]["fits"]
    for name, option in (("LoRA (--lora)", "--lora"), ("QLoRA (--qlora)", "--qlora")):
        rows = {row["strategy"]: row for row in json.loads(run(*command, option).stdout)["rows"]}
        assert found[name]["nbytes"] == rows["exact + checkpointing"]["peak_bytes"]
    text = unwrapped(run(*command[:-1], "--gpu", "6GiB").stdout).splitlines()
    assert text[-6] == "none of these fits" and "QLoRA (--qlora), exact + checkpointing" in text[-2]
    assert "would fit" in text[-2]


@pytest.mark.daily(3)
def test_frozen_weights_on_the_host_are_offered_with_the_bytes_that_leave_the_card(tmp_path):
    """The last line, as it is printed: to the byte where they would fit and where they would not."""
    from hf_actcompress.memory.estimation.estimates import Estimates
    from hf_actcompress.quick.sizes import readable_size

    path = tmp_path / "five.json"
    path.write_text(json.dumps({**CONFIG, "hidden_size": 64, "num_hidden_layers": 5}))
    elsewhere = Estimates(str(path), dtype="bfloat16", lora=True).frozen_elsewhere()
    whole = estimate(str(path), batch_size=2, seq_len=16, gradient_checkpointing=True, lora=True).device_bytes
    options = (*SIZES, "--preset", "exact", "--lora", "--gpu")
    for room, verdict in ((whole - elsewhere, "would fit"), (whole - elsewhere - 1, "would not fit")):
        result = run("estimate", str(path), *options, f"{room}B")
        assert result.exit_code == Exit.DOES_NOT_FIT, result.output
        *_, line = unwrapped(result.stdout).splitlines()
        assert line == (
            "  frozen weights in host memory, with FSDP, DeepSpeed or accelerate "
            f"({readable_size(elsewhere)} less), exact + checkpointing: {readable_size(whole - elsewhere)}, {verdict}"
        )
    # processes that share the weights have them elsewhere already
    result = run("estimate", str(path), *options, f"{whole // 2}B", "--fsdp", "4")
    assert result.exit_code == Exit.DOES_NOT_FIT and "host memory" not in result.stdout


def test_frozen_weights_elsewhere_are_those_of_all_layers_but_two():
    from transformers import LlamaConfig

    from hf_actcompress.memory.estimation.estimates import Estimates

    config = LlamaConfig(**{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5, "vocab_size": 64})
    assert Estimates(config, dtype="bfloat16").frozen_elsewhere() == 0
    layer = 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64)
    # what is trained stays, and so do embeddings and the head
    found = Estimates(config, dtype="bfloat16", lora=True).frozen_elsewhere()
    assert found == 3 * layer


def test_estimate_as_json_is_the_api(model):
    found = estimate(model, batch_size=2, seq_len=16, config="exact")
    room = found.device_bytes + 100_000
    data = json.loads(run("estimate", model, *SIZES, "--preset", "exact", "--gpu", f"{room}B", "--json").stdout)
    assert data["gpu_bytes"] == room and [row["strategy"] for row in data["rows"]] == ["stock", "exact"]
    row = data["rows"][1]
    assert row["estimate"] == json.loads(found.to_json())
    assert row["peak_bytes"] == found.device_bytes and row["fits"] is True
    assert (row["extra_time"], row["gradients"]) == ("low", "exact")
    largest = row["largest_batch_size"]
    for batch_size, fits in ((largest, True), (largest + 1, False)):
        needed = estimate(model, batch_size=batch_size, seq_len=16, config="exact").device_bytes
        assert (needed <= room) == fits


def test_estimate_with_lora_and_an_optimizer(model):
    options = (*SIZES, "--preset", "exact", "--json", "--optimizer")
    full = json.loads(run("estimate", model, *options, "adamw").stdout)["rows"][1]["estimate"]
    lora = json.loads(run("estimate", model, *options, "sgd", "--lora-rank", "4").stdout)["rows"][1]["estimate"]
    assert 0 < lora["gradients_bytes"] < full["gradients_bytes"]
    assert lora["optimizer_bytes"] == 0 < full["optimizer_bytes"]


def test_every_strategy_by_default(model):
    result = run("estimate", model, "--batch-size", "4", "--seq-len", "128", "--json")
    rows = json.loads(result.stdout)["rows"]
    assert [row["strategy"] for row in rows] == [strategy.name for strategy in DEFAULT]
    kept = {row["strategy"]: row["estimate"]["kept_bytes"] for row in rows}
    lossy = ["lossy 8 bits", "exact", "exact", "lossy 8 bits", "lossy 4 bits", "exact"]
    assert [row["gradients"] for row in rows][4:] == lossy
    assert kept["int4"] < kept["int8"] < kept["exact"] < kept["stock"]
    assert kept["exact + 8-bit checkpoint"] < kept["exact + checkpointing"] < kept["exact"]
    assert kept["offload"] < kept["exact"] > kept["long"] > kept["long + checkpointing"]
    # without a card there is no verdict
    assert all(row["fits"] is None and row["largest_batch_size"] is None for row in rows)


def test_a_page_of_its_own(model, tmp_path, monkeypatch):
    page = tmp_path / "page.html"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("estimate", model, *SIZES, "--preset", "exact", "--gpu", "24GB", "--html", str(page))
    assert result.exit_code == Exit.OK and "exact" in result.stdout, result.output
    text = page.read_text()
    assert not re.search(r"https?:|<img|url\(|\bsrc=", text) and text.count("<script") == 1
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text
    # both strategies have the card's line, and their parts from the largest to the smallest
    assert "24GB, 22.35 GiB" in text and text.count('class="mark"') == 2
    assert "optimizer states" in text and "<td>exact</td>" in text
    rows = re.findall(r'<td>exact</td><td>([^<]*)</td><td class="number">', text)
    found = dict(estimate(model, batch_size=2, seq_len=16, config="exact").rows())
    assert rows == sorted(found, key=found.__getitem__, reverse=True)


def test_a_page_of_a_report(model, tmp_path, monkeypatch):
    page = tmp_path / "page.html"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("report", model, *SIZES, "--html", str(page))
    assert result.exit_code == Exit.OK, result.output
    text = page.read_text()
    assert not re.search(r"https?:|<img|url\(|\bsrc=", text) and text.count("<script") == 1
    # a curve of each step and the line where its backward begins; the bars of both
    assert len(re.findall(r'stroke-width="2" d="M0 300(?:H[0-9.]+V[0-9.]+){20,}"', text)) == 2
    assert text.count("stroke-dasharray") == 2 and text.count('class="bar"') == 2
