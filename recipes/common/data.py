"""Text to train on: where documents come from, and how they become blocks of tokens in a fixed order."""

import argparse
import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

EVAL_EVERY = 20  # one document in twenty is held out
# Installed packages and test suites would make the corpus differ from machine to machine.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "ensurepip", "lib2to3", "__pycache__"}
)

Example = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Corpus:
    """Documents, split by document into what is trained on and what is held out."""

    name: str
    train: list[str]
    held_out: list[str]

    def fingerprint(self) -> str:
        """A hash of the content, to key caches with."""
        digest = hashlib.sha256()
        for part in (self.train, self.held_out):
            digest.update(f"{len(part)};".encode())
            for text in part:
                digest.update(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
        return digest.hexdigest()[:16]


def stdlib_folder() -> Path:
    """Where this Python keeps its standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_files() -> list[Path]:
    """The standard library's source files, in one order on every file system."""
    root = stdlib_folder()
    found = (path for path in root.rglob("*.py") if not SKIPPED_FOLDERS & set(path.relative_to(root).parts))
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def read_text(path: Path) -> str:
    """A file as text; bytes that are not UTF-8 (a few old source files) are replaced."""
    return path.read_text(encoding="utf-8", errors="replace")


def matching_files(pattern: str) -> list[Path]:
    """The files that a glob names, sorted; an empty match is an error."""
    found = sorted(path for path in glob.glob(os.path.expanduser(pattern), recursive=True) if os.path.isfile(path))
    if not found:
        raise SystemExit(f"--text-files {pattern!r} matches no file (quote it, and use ** to descend into folders)")
    return [Path(path) for path in found]


def load_splits(args: argparse.Namespace, columns: Iterable[str]):
    """`--dataset` through datasets: its train split and its held-out split, cut from train where there is none."""
    from datasets import load_dataset

    splits = load_dataset(args.dataset, args.dataset_config)
    if "train" not in splits:
        raise SystemExit(f"--dataset {args.dataset}: no split named train among {sorted(splits)}")
    train = splits["train"]
    missing = [column for column in columns if column not in train.column_names]
    if missing:
        raise SystemExit(f"--dataset {args.dataset}: no column {missing[0]!r} among {train.column_names}")
    if args.max_documents:
        train = train.select(range(min(args.max_documents, len(train))))
    held_out = next((splits[name] for name in ("validation", "test") if name in splits), None)
    if held_out is None:
        if len(train) < 2:
            raise SystemExit(f"--dataset {args.dataset}: {len(train)} rows cannot be split in two")
        cut = train.train_test_split(test_size=max(1, len(train) // EVAL_EVERY), seed=0)
        train, held_out = cut["train"], cut["test"]
    return train, held_out


def load_corpus(args: argparse.Namespace) -> Corpus:
    """The documents that the options ask for."""
    if args.dataset:
        train, held_out = load_splits(args, [args.text_column])
        return Corpus(args.dataset, list(train[args.text_column]), list(held_out[args.text_column]))
    files = matching_files(args.text_files) if args.text_files else stdlib_files()
    texts = [read_text(path) for path in files[: args.max_documents]]
    # Split by file, so that no held-out block has its neighbours in the training text.
    held_out = texts[EVAL_EVERY // 2 :: EVAL_EVERY] or texts[-1:]
    train = [text for i, text in enumerate(texts) if i % EVAL_EVERY != EVAL_EVERY // 2]
    return Corpus(args.text_files or "Python standard library", train, held_out)


def token_blocks(texts: list[str], tokenizer: PreTrainedTokenizerBase, seq_len: int, cache: Path) -> torch.Tensor:
    """All texts tokenized, joined by the end-of-text token and cut into rows of seq_len; uncut tokens are cached."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    if not cache.is_file():
        end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
        ends = [] if end is None else [end]
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        flat = torch.tensor([token for ids in encoded for token in (*ids, *ends)], dtype=torch.int32)
        unfinished = cache.with_suffix(f".{os.getpid()}")  # another process may be writing the same file
        torch.save(flat, unfinished)
        unfinished.replace(cache)
    flat = torch.load(cache, weights_only=True)
    rows = flat.numel() // seq_len
    if rows == 0:
        raise SystemExit(f"{flat.numel()} tokens of text do not fill one sequence of --seq-len {seq_len}")
    return flat[: rows * seq_len].view(rows, seq_len).long()


def corpus_blocks(
    args: argparse.Namespace, corpus: Corpus, tokenizer: PreTrainedTokenizerBase
) -> tuple[torch.Tensor, torch.Tensor]:
    """The training and the held-out rows of a corpus, (rows, seq_len) int64."""
    vocabulary = hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]
    cache = args.cache_dir / f"tokens-{corpus.fingerprint()}-{vocabulary}"
    train = token_blocks(corpus.train, tokenizer, args.seq_len, cache.with_suffix(".train.pt"))
    return train, token_blocks(corpus.held_out, tokenizer, args.seq_len, cache.with_suffix(".eval.pt"))


class CausalBlocks(Dataset[Example]):
    """Rows of tokens as examples; the model shifts the labels itself."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> Example:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


def shuffled_order(examples: int, seed: int, count: int) -> list[int]:
    """The first `count` example numbers, a new permutation for every pass over the data."""
    order: list[int] = []
    while len(order) < count:
        generator = torch.Generator().manual_seed(seed + len(order))
        order.extend(torch.randperm(examples, generator=generator).tolist())
    return order[:count]


class InOrder(Dataset[Example]):
    """Examples in a given order. A step's batch follows from its number alone, which is what makes runs resumable."""

    def __init__(self, examples: Dataset[Example], order: list[int], start: int = 0) -> None:
        self.examples, self.order, self.start = examples, order, start

    def __len__(self) -> int:
        return len(self.order) - self.start

    def __getitem__(self, index: int) -> Example:
        return self.examples[self.order[self.start + index]]


def make_loader(dataset: Dataset[Example], batch_size: int, collate=None) -> DataLoader[Example]:
    """A plain loader. It has its own generator because a loader otherwise draws from the one that dropout uses."""
    return DataLoader(dataset, batch_size, collate_fn=collate, drop_last=True, generator=torch.Generator())


def training_loader(
    args: argparse.Namespace, examples: Dataset[Example], world: int, start_step: int, collate=None
) -> DataLoader[Example]:
    """The micro-batches of all processes from start_step to the end; accelerate deals them out in turn."""
    per_step = args.batch_size * args.gradient_accumulation_steps * world
    order = shuffled_order(len(examples), args.seed, per_step * args.max_steps)
    return make_loader(InOrder(examples, order, start_step * per_step), args.batch_size, collate)


def evaluation_loader(
    args: argparse.Namespace, examples: Dataset[Example], world: int, collate=None
) -> DataLoader[Example]:
    """--eval-batches micro-batches for each process, or what there is; a small set is repeated to fill the first."""
    count = max(args.batch_size * world, min(len(examples), args.eval_batches * args.batch_size * world))
    # Shuffled, because the first rows would all be of one document or class; the same rows whatever the run's seed.
    order = shuffled_order(len(examples), 0, count)
    return make_loader(InOrder(examples, order), args.batch_size, collate)
