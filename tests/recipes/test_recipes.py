"""Every recipe runs for a few steps with every option, resumes with equal bits, and refuses what cannot work."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("datasets")
pytest.importorskip("peft")

from accelerate.state import AcceleratorState, GradientState, PartialState

from hf_actcompress.methods.row_sample.codec_gradient_norms import RememberedNorms

pytestmark = pytest.mark.daily(3)

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
NAMES = ("finetune_clm", "finetune_mlm", "finetune_classification", "trainer_example")
LOOPS = NAMES[:3]
SMALL = ["--batch-size", "2", "--seq-len", "32", "--warmup", "1", "--eval-batches", "1", "--vocab-size", "512"]

Run = Callable[..., int]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for the module: tokenizers are trained once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of source files of Python's own library, which stay as they are, under two class names."""
    folder = tmp_path_factory.mktemp("texts")
    library = Path(json.__file__).parents[1]
    for name, source in (("package", library / "email"), ("recipe", library / "asyncio")):
        (folder / name).mkdir()
        for i, path in enumerate(sorted(source.glob("*.py"))[:15]):
            (folder / name / f"{i:02}.txt").write_text(path.read_text() + "\n# end\n")
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, cache: Path, texts: Path, tmp_path: Path) -> Iterator[Run]:
    """Calls a recipe's main() with small settings; by default on the folder of texts."""
    monkeypatch.syspath_prepend(str(RECIPES))
    # Accelerate refuses a second precision in one process, and DDP tests may have left their own state.
    states = (AcceleratorState, GradientState, PartialState)

    def call(recipe: str, *options: str, out: str = "out", data: tuple[str, ...] | None = None) -> int:
        for state in states:
            state._reset_state()
        data = ("--text-files", f"{texts}/**/*.txt") if data is None else data
        places = ("--output-dir", str(tmp_path / out), "--cache-dir", str(cache))
        return importlib.import_module(recipe).main([*SMALL, *data, *places, *options])

    threads = torch.get_num_threads()
    yield call
    torch.set_num_threads(threads)
    for state in states:
        state._reset_state()
    for name in [name for name in sys.modules if name in NAMES or name.split(".")[0] == "common"]:
        del sys.modules[name]


def losses_of(folder: Path) -> list[float]:
    return json.loads((folder / "losses.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("recipe", NAMES)
def test_compare_agrees_and_leaves_json_and_picture(recipe: str, run: Run, tmp_path: Path, capsys) -> None:
    assert run(recipe, "--compare", "--max-steps", "3") == 0
    printed = capsys.readouterr().out
    assert "The losses agree" in printed and "% less" in printed
    document = json.loads((tmp_path / "out" / "compare.json").read_text())
    stock, patched = document["comparison"]["stock"], document["comparison"]["patched"]
    assert document["comparison"]["first_difference"] <= document["comparison"]["first_tolerance"]
    assert len(stock["losses"]) == len(patched["losses"]) == 3
    assert 0 < patched["peak_bytes"] < stock["peak_bytes"]
    assert document["environment"]["torch"] == torch.__version__
    assert document["arguments"]["seq_len"] == 32
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", NAMES)
@pytest.mark.parametrize(
    "options",
    [
        ("--lora", "--lora-dropout", "0.1"),
        ("--gradient-checkpointing",),
        ("--mixed-precision", "bf16"),
        ("--dtype", "bfloat16", "--lora", "--gradient-checkpointing"),
        ("--gradient-accumulation-steps", "2"),
    ],
    ids=" ".join,
)
def test_options_agree_with_stock(recipe: str, options: tuple[str, ...], run: Run) -> None:
    assert run(recipe, "--compare", "--max-steps", "2", *options) == 0


@pytest.mark.slow
def test_gpt2_agrees_with_stock(run: Run) -> None:
    assert run("finetune_clm", "--compare", "--max-steps", "2", "--config", "tiny-gpt2") == 0


@pytest.mark.slow
@pytest.mark.parametrize("recipe", LOOPS)
def test_resumed_run_equals_a_straight_one(recipe: str, run: Run, tmp_path: Path) -> None:
    # The tiny BERT has dropout, so this fails unless the generator's state comes back too.
    assert run(recipe, "--max-steps", "4", "--save-every", "2", out="straight") == 0
    checkpoint = tmp_path / "straight" / "checkpoint-2"
    assert run(recipe, "--max-steps", "4", "--resume", str(checkpoint), out="resumed") == 0
    assert losses_of(tmp_path / "resumed") == losses_of(tmp_path / "straight")
    straight, resumed = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("straight", "resumed"))
    assert straight == resumed


@pytest.mark.slow
def test_gpt2_resumes_with_accumulation(run: Run, tmp_path: Path) -> None:
    options = ("--config", "tiny-gpt2", "--gradient-accumulation-steps", "2", "--max-steps", "4")
    assert run("finetune_clm", *options, "--save-every", "2", out="straight") == 0
    checkpoint = tmp_path / "straight" / "checkpoint-2"
    assert run("finetune_clm", *options, "--resume", str(checkpoint), out="resumed") == 0
    assert losses_of(tmp_path / "resumed") == losses_of(tmp_path / "straight")


@pytest.mark.slow
def test_trainer_resumes(run: Run, tmp_path: Path) -> None:
    assert run("trainer_example", "--max-steps", "4", "--save-every", "2") == 0
    assert run("trainer_example", "--max-steps", "4", "--resume", str(tmp_path / "out" / "checkpoint-2")) == 0


@pytest.mark.slow
def test_the_callback_feeds_the_cache_of_gradient_norms(
    run: Run, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two epochs of a few sequences with the preset "wtacrs": in the second epoch each sequence is known."""
    recipe = importlib.import_module("trainer_example")
    made, known, build = [], [], recipe.make_trainer
    expect = RememberedNorms.expect

    def watched(norms: RememberedNorms, rows: int, samples: torch.Tensor) -> torch.Tensor:
        known.append(all(number in norms._row for number in samples.tolist()))
        return expect(norms, rows, samples)

    monkeypatch.setattr(recipe, "make_trainer", lambda *args: made.append(build(*args)) or made[-1])
    monkeypatch.setattr(RememberedNorms, "expect", watched)
    data = ("--text-files", str(texts / "package" / "00.txt"))
    assert run("trainer_example", "--max-steps", "1", "--preset", "wtacrs", data=data) == 0
    epoch = len(made[0].get_train_dataloader())
    known.clear()
    assert run("trainer_example", "--max-steps", str(2 * epoch), "--preset", "wtacrs", data=data) == 0
    assert known and not any(known[: len(known) // 2]) and all(known[len(known) // 2 :])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", LOOPS[:2])
def test_accumulation_is_one_large_batch(recipe: str, run: Run, tmp_path: Path) -> None:
    # Losses are weighted by tokens, so four rows in two micro-batches are the same step as four rows at once. The
    # second loss comes after an optimizer step, so it compares the gradients as well.
    whole, halves = ("--batch-size", "4"), ("--batch-size", "2", "--gradient-accumulation-steps", "2")
    quiet = ("--max-steps", "2", "--model", str(model_without_dropout(recipe, tmp_path, run)))
    assert run(recipe, *quiet, *whole, out="whole") == 0
    assert run(recipe, *quiet, *halves, out="halves") == 0
    for one, other in zip(losses_of(tmp_path / "whole"), losses_of(tmp_path / "halves"), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def model_without_dropout(recipe: str, folder: Path, run: Run) -> Path:
    """A trained folder of the recipe's tiny model with dropout turned off in its configuration."""
    assert run(recipe, "--max-steps", "1", out="base") == 0
    path = folder / "base" / "config.json"
    config = json.loads(path.read_text())
    config.update({name: 0.0 for name in config if name.endswith("dropout_prob")})
    path.write_text(json.dumps(config))
    return folder / "base"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", NAMES)
def test_trains_a_saved_model_again(recipe: str, run: Run, tmp_path: Path) -> None:
    assert run(recipe, "--max-steps", "2", out="first") == 0
    assert run(recipe, "--max-steps", "2", "--model", str(tmp_path / "first"), "--compare") == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "text"])
def test_reads_a_local_dataset(kind: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    lines = [f"line {i}: the quick brown fox jumps over {i} lazy dogs and over {i + 1} cats" for i in range(200)]
    if kind == "jsonl":
        (folder / "train.jsonl").write_text("\n".join(json.dumps({"body": line}) for line in lines))
    else:
        (folder / "train.txt").write_text("\n".join(lines))
    column = ("--text-column", "body") if kind == "jsonl" else ()
    for recipe in ("finetune_clm", "finetune_mlm"):
        assert run(recipe, "--max-steps", "2", *column, data=("--dataset", str(folder))) == 0


@pytest.mark.slow
def test_classifies_a_local_dataset(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for split, count in (("train", 40), ("test", 10)):
        rows = [{"text": f"number {i} is {'even' if i % 2 == 0 else 'odd'}", "odd": i % 2} for i in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ("--max-steps", "2", "--label-column", "odd")
    assert run("finetune_classification", *options, data=("--dataset", str(folder))) == 0


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["finetune_clm", "finetune_classification"])
def test_standard_library_is_the_default_text(recipe: str, run: Run) -> None:
    assert run(recipe, "--max-steps", "2", "--max-documents", "64", data=()) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--preset", "nonsense"), "exact"),
        (("--config", "tiny-nothing"), "tiny-llama"),
        (("--lora-dropout", "0.1"), "--lora"),
        (("--batch-size", "0"), "above 0"),
        (("--resume", "no/such/folder"), "no checkpoint there"),
        (("--compare", "--save-every", "2"), "--compare"),
        (("--dataset-config", "en"), "--dataset"),
    ],
    ids=" ".join,
)
def test_bad_options_are_refused(options: tuple[str, ...], message: str, run: Run, capsys) -> None:
    with pytest.raises(SystemExit):
        run("finetune_clm", *options, data=())
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "data", "message"),
    [
        (("--model", "{tmp}"), None, "tokenizer cannot be loaded"),
        (("--vocab-size", "100"), None, "at least"),
        (("--seq-len", "100000000"), None, "do not fill"),
        ((), ("--text-files", "{tmp}/*.nothing"), "matches no file"),
    ],
    ids=["model", "vocabulary", "length", "glob"],
)
def test_bad_inputs_are_explained(options, data, message: str, run: Run, tmp_path: Path) -> None:
    options = tuple(option.format(tmp=tmp_path) for option in options)
    data = data and tuple(part.format(tmp=tmp_path) for part in data)
    with pytest.raises(SystemExit, match=message):
        run("finetune_clm", *options, data=data)


@pytest.mark.slow
def test_runs_as_a_script(cache: Path, texts: Path, tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    options = [*SMALL, "--max-steps", "2", "--text-files", f"{texts}/**/*.txt", "--cache-dir", str(cache)]
    command = [sys.executable, str(RECIPES / "finetune_clm.py"), "--compare", *options]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "finetune_clm" / "compare.png").is_file()


@pytest.mark.slow
def test_two_processes_agree_with_one(run: Run, cache: Path, texts: Path, tmp_path: Path) -> None:
    # Two processes of two micro-batches see the rows that one process sees in four: the same step, token by token.
    assert run("finetune_clm", "--max-steps", "3", "--gradient-accumulation-steps", "4", out="one") == 0
    options = [*SMALL, "--max-steps", "3", "--gradient-accumulation-steps", "2", "--cache-dir", str(cache)]
    options += ["--text-files", f"{texts}/**/*.txt", "--output-dir", str(tmp_path / "two")]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [*launcher, str(RECIPES / "finetune_clm.py"), *options]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-5)
