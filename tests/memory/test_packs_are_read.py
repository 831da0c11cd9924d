"""A codec packs what a backward reads, and nothing else: each pack costs time, and bytes until it is dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.codecs import IntGroup
from hf_actcompress.config import PRESETS
from tests.families import BY_NAME, step

INT8 = CompressionConfig(**{**vars(PRESETS["int8"]), "loss_head": False})


class Packs:
    """Records what `IntGroup` codecs pack, by the address of the codes, and which packs are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.packed: dict[int, tuple[Tensor, tuple[int, ...]]] = {}
        self.read: set[int] = set()
        for name in ("pack", "unpack", "grad_weight"):
            monkeypatch.setattr(IntGroup, name, self._watched(name, getattr(IntGroup, name)))

    def _watched(self, name: str, method: Any) -> Any:
        def watched(codec: IntGroup, *args: Any) -> Any:
            result = method(codec, *args)
            if name == "pack":
                codes = result[0][0]
                # the codes are held, so that their memory is not used again for other codes
                self.packed[codes.data_ptr()] = codes, tuple(args[0].shape)
            elif result is not None:
                tensors = args[0] if name == "unpack" else args[1]
                self.read.add(tensors[0].data_ptr())
            return result

        return watched

    def unread(self) -> list[tuple[int, ...]]:
        return [shape for memory, (_, shape) in self.packed.items() if memory not in self.read]


@pytest.mark.parametrize("name", ["bert", "gpt2-gelu-tanh", "llama", "opt", "vit"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_every_pack_is_read(name: str, dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    family = BY_NAME[name]
    model, packs = patch_model(family.build(dropout=dropout), INT8), Packs(monkeypatch)
    step(model, family.make_batch())
    assert len(packs.packed) >= 8 and packs.unread() == []


def test_inputs_of_an_adapters_rank_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, init_lora_weights=False)
    model = patch_model(get_peft_model(BY_NAME["llama"].build(torch.bfloat16), config), INT8)
    packs = Packs(monkeypatch)
    step(model, BY_NAME["llama"].make_batch())
    assert packs.packed and packs.unread() == []
    assert 4 not in {shape[-1] for _, shape in packs.packed.values()}
