"""`python -m hf_actcompress.memory.closed_form` fits the formula again and writes its data. A class takes minutes.

With `--modes` or `--strategies` only these are fitted, and the rest of the data stays, for a change that does not
affect the others.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ...quick.strategies import STRATEGIES
from .export import DATA, MODES, write
from .probes import FAMILIES

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--out", type=Path, default=DATA, help="the folder of the files, one for each class")
parser.add_argument("--classes", nargs="*", default=list(FAMILIES), choices=list(FAMILIES), metavar="CLASS")
parser.add_argument("--modes", nargs="*", default=[], choices=list(MODES), metavar="MODE")
parser.add_argument("--strategies", nargs="*", default=[], choices=list(STRATEGIES), metavar="STRATEGY")
options = parser.parse_args()
for name in options.classes:
    write(name, options.out, options.modes, options.strategies)
    print(name)
