"""The key under which torch's compile caches store the graphs of patched models. It tells codecs of one name apart."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from hf_actcompress.codecs import IntGroup, Offload
from hf_actcompress.compilation.install import Partitioner
from hf_actcompress.extension import register_codec

CODE = """
from dataclasses import dataclass
from hf_actcompress.codecs import Codec

@dataclass(frozen=True)
class Mine(Codec):
    scale: float = 2.0

    def pack(self, x):
        return (x * self.scale,), None

    def unpack(self, tensors, meta):
        return tensors[0] / self.scale

    def nbytes(self, shape, dtype):
        return shape.numel() * dtype.itemsize
"""


def _codec(code: str, folder: Path, patch: pytest.MonkeyPatch) -> Any:
    """The codec of a module with that code, as the next process imports it after the file has changed."""
    path = folder / "mine.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location("mine", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, "mine", module)
    exec(compile(code, str(path), "exec"), module.__dict__)
    return module.Mine()


def _keys(codec: Any) -> list[Any]:
    """The key, asked for twice."""
    with register_codec("mine", codec):
        return [Partitioner(None).uuid() for _ in range(2)]


def test_other_parameters() -> None:
    keys = {key for codec in (IntGroup(5), IntGroup(5, outliers=4), Offload(IntGroup(5))) for key in _keys(codec)}
    assert len(keys) == 3 and Partitioner(None).uuid() not in keys


def test_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other code is another key, inside of another codec too."""
    keys = []
    for code in (CODE, CODE.replace("x * self.scale", "x + self.scale"), CODE):
        codec = _codec(code, tmp_path, monkeypatch)
        keys.append([_keys(codec), _keys(Offload(codec))])
    assert keys[0] == keys[2] and len({key for of_code in keys for pair in of_code for key in pair}) == 4


class _Keyless(CustomPartitionerFn):
    def __call__(self, gm: Any, joint_inputs: Any, **options: Any) -> Any:
        raise NotImplementedError

    def uuid(self) -> None:
        return None


def test_what_has_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code without a file, as in a console, and another's partition without a key: no graph is found in a cache."""
    codec = _codec(CODE, tmp_path, monkeypatch)
    monkeypatch.delitem(sys.modules, "mine")
    keys = [*_keys(codec), *(Partitioner(_Keyless()).uuid() for _ in range(2))]
    assert len(set(keys)) == 4 and None not in keys
