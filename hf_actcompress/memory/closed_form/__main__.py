"""`python -m hf_actcompress.memory.closed_form`: fits the formula anew and writes its data, minutes for each class."""

from __future__ import annotations

import argparse
from pathlib import Path

from .export import DATA, write
from .probes import FAMILIES

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--out", type=Path, default=DATA, help="the folder of the files, one for each class")
parser.add_argument("--classes", nargs="*", default=list(FAMILIES), choices=list(FAMILIES), metavar="CLASS")
options = parser.parse_args()
for name in options.classes:
    write(name, options.out)
    print(name)
