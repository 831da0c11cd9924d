"""What a command changes in its own process while it runs: estimates take less time, and others' remarks are hidden."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from ..garbage import frozen_imports, without_collections

_BITSANDBYTES = "bitsandbytes"


@contextmanager
def for_estimates() -> Iterator[None]:
    """Import what estimates need, and let them take less time: they are made of thousands of small tensors, and run no
    kernel. Each step collects its own garbage.
    """
    with without_collections():
        from ..memory.estimation import estimates  # noqa: F401

        with frozen_imports(), one_thread(), without_bitsandbytes():
            yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread, because further threads do nothing for small tensors: they wait in busy loops,
    which costs process time and slows the programs beside them.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def without_bitsandbytes() -> Iterator[None]:
    """Hide bitsandbytes from peft and diffusers, because to import it takes longer than to import peft: it imports
    torch's compiler.

    In a training, peft needs bitsandbytes to wrap its layers. An estimate has stand-ins of this package in their place.
    """
    if _BITSANDBYTES in sys.modules or "diffusers" in sys.modules:
        # diffusers, once imported, relies on what it has found then
        yield
        return
    # Python takes a module that is None here for one that is not installed
    sys.modules[_BITSANDBYTES] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[_BITSANDBYTES]
        peft = sys.modules.get("peft.import_utils")
        for name in ("is_bnb_available", "is_bnb_4bit_available"):
            # they remember their answers
            getattr(getattr(peft, name, None), "cache_clear", lambda: None)()


@contextmanager
def only_our_words() -> Iterator[None]:
    """Suppress warnings and log messages, which are about a training that does not run here.

    They are of bitsandbytes, peft, transformers and torch, and nobody can act on them. This package's commands write
    their own words to stderr without a logger. With ACTCOMPRESS_TRACEBACK set everything is shown.
    """
    if os.environ.get("ACTCOMPRESS_TRACEBACK"):
        yield
        return
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(before)
