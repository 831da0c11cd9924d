"""Graphics cards by their common names, and their memory in MiB, as nvidia-smi shows it."""

from __future__ import annotations

import re

from .sizes import parse_size

CARDS: dict[str, int] = {
    "t4": 15360, "v100": 16384, "v100-32gb": 32768, "p100": 16384,
    "a10": 23028, "a10g": 23028, "a30": 24576, "a40": 46068, "l4": 23034, "l40": 46068, "l40s": 46068,
    "a100": 40960, "a100-40gb": 40960, "a100-80gb": 81920, "h100": 81559, "h200": 143771,
    "rtxa4000": 16376, "rtxa5000": 24564, "rtxa6000": 49140, "rtx6000ada": 49140,
    "rtx2080ti": 11264, "rtx3060": 12288, "rtx3070": 8192, "rtx3080": 10240, "rtx3090": 24576, "rtx3090ti": 24564,
    "rtx4060": 8188, "rtx4060ti": 8188, "rtx4060ti-16gb": 16380, "rtx4070": 12282, "rtx4070ti": 12282,
    "rtx4080": 16376, "rtx4090": 24564, "rtx5070": 12227, "rtx5070ti": 16303, "rtx5080": 16303, "rtx5090": 32607,
}  # fmt: skip


def card_bytes(text: str) -> int:
    """Bytes of a card by its name ("rtx4090", "RTX 4090", "A100-80GB"), or of a size ("24GB", "24G", "24", "22GiB").

    A number alone is in GB (10^9 bytes), as cards are sold.

    Raises:
        ValueError: Neither a card that is known nor a size.
    """
    name = re.sub(r"nvidia|geforce|tesla|[\s_]", "", text.lower())
    for known in (name, f"rtx{name}", re.sub(r"(?<=\d)(?=\d\dgb$)", "-", name)):
        if known in CARDS:
            return CARDS[known] * 2**20
    number = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)g?", name)
    try:
        return parse_size(f"{number[1]}GB" if number else text)
    except ValueError as error:
        raise ValueError(f"{error}, or a card: {', '.join(CARDS)}") from None
