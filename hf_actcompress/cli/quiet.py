"""While a command runs, other libraries say nothing on stderr."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


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
