"""Labelled examples: functions of the standard library with their package, files with their folder, or a dataset."""

import argparse
import ast
import textwrap
from collections import defaultdict
from dataclasses import dataclass

from .data import EVAL_EVERY, Corpus, load_splits, matching_files, read_text, stdlib_files, stdlib_folder

PACKAGES = 8  # the largest ones; small packages have too few functions to hold some out
FUNCTIONS_PER_PACKAGE = 400  # so that a model that always guesses the largest package scores low
SHORTEST_FUNCTION = 4  # lines; a one-line accessor says nothing of where it comes from

Labelled = tuple[str, str]


@dataclass(frozen=True)
class Task:
    """Texts and their classes, and what the classes are called."""

    corpus: Corpus
    train_labels: list[int]
    held_out_labels: list[int]
    names: list[str]


def functions(source: str) -> list[str]:
    """The functions and methods of a source file, dedented; none where it does not parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    lines, found = source.splitlines(), []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            body = lines[node.lineno - 1 : node.end_lineno]
            if len(body) >= SHORTEST_FUNCTION:
                found.append(textwrap.dedent("\n".join(body)))
    return found


def stdlib_functions() -> tuple[list[Labelled], list[Labelled]]:
    """Functions of the largest packages with the package's name; whole files are held out."""
    root = stdlib_folder()
    by_package: dict[str, list[list[str]]] = defaultdict(list)  # package -> file -> functions
    for path in stdlib_files():
        parts = path.relative_to(root).parts
        if len(parts) > 1:
            by_package[parts[0]].append(functions(read_text(path)))
    # Ties by name, so that the classes are the same wherever the library is.
    ranked = sorted(by_package, key=lambda name: (-sum(map(len, by_package[name])), name))[:PACKAGES]
    train: list[Labelled] = []
    held_out: list[Labelled] = []
    for name in ranked:
        files = [functions_of for functions_of in by_package[name] if functions_of]
        # The packages have few files each: hold one in five out here, of which only some functions are used.
        held = [(text, name) for file in files[2::5] for text in file]
        kept = [(text, name) for i, file in enumerate(files) if i % 5 != 2 for text in file]
        train += kept[:FUNCTIONS_PER_PACKAGE]
        held_out += held[: FUNCTIONS_PER_PACKAGE // 5]
    return train, held_out


def folder_files(pattern: str) -> tuple[list[Labelled], list[Labelled]]:
    """Files labelled with the name of the folder they are in."""
    found = [(read_text(path), path.resolve().parent.name) for path in matching_files(pattern)]
    held_out = found[EVAL_EVERY // 2 :: EVAL_EVERY] or found[-1:]
    return [item for i, item in enumerate(found) if i % EVAL_EVERY != EVAL_EVERY // 2], held_out


def load_task(args: argparse.Namespace) -> Task:
    """The labelled examples that the options ask for."""
    if args.dataset:
        columns = [args.text_column, args.label_column]
        train, held_out = (
            list(zip(split[columns[0]], map(str, split[columns[1]]), strict=True))
            for split in load_splits(args, columns)
        )
        name = args.dataset
    elif args.text_files:
        (train, held_out), name = folder_files(args.text_files), args.text_files
    else:
        (train, held_out), name = stdlib_functions(), "functions of the Python standard library"
    if args.max_documents:
        # The examples come class by class: a stride keeps all classes.
        train = train[:: -(-len(train) // args.max_documents)]
    names = sorted({label for _, label in (*train, *held_out)})
    if len(names) < 2:
        raise SystemExit(f"{name}: {len(names)} class among the labels; classification needs two")
    number = {label: i for i, label in enumerate(names)}
    corpus = Corpus(name, [text for text, _ in train], [text for text, _ in held_out])
    return Task(corpus, [number[label] for _, label in train], [number[label] for _, label in held_out], names)
