"""Graphics cards by their common names, and their memory in MiB, as nvidia-smi and rocm-smi show it."""

from __future__ import annotations

import re
from difflib import get_close_matches

from .sizes import parse_size

CARDS: dict[str, int] = {
    "t4": 15360, "p100": 16384, "v100": 16384, "v100-32gb": 32768,
    "a2": 15356, "a10": 23028, "a10g": 23028, "a16": 15356, "a30": 24576, "a40": 46068,
    "l4": 23034, "l40": 46068, "l40s": 46068,
    "a100": 40960, "a100-80gb": 81920, "h100": 81559, "h100-nvl": 95830, "gh200": 97871, "h200": 143771, "b200": 183359,
    "rtxa2000": 6138, "rtxa4000": 16376, "rtxa4500": 20470, "rtxa5000": 24564, "rtxa6000": 49140,
    "rtx4000ada": 20475, "rtx4500ada": 24570, "rtx5000ada": 32760, "rtx6000ada": 49140, "rtxpro6000": 97887,
    "gtx1080ti": 11264, "rtx2060": 6144, "rtx2070": 8192, "rtx2080": 8192, "rtx2080ti": 11264,
    "rtx3050": 8192, "rtx3060": 12288, "rtx3060-8gb": 8192, "rtx3060ti": 8192, "rtx3070": 8192, "rtx3070ti": 8192,
    "rtx3080": 10240, "rtx3080-12gb": 12288, "rtx3080ti": 12288, "rtx3090": 24576, "rtx3090ti": 24564,
    "rtx4060": 8188, "rtx4060ti": 8188, "rtx4060ti-16gb": 16380, "rtx4070": 12282, "rtx4070super": 12282,
    "rtx4070ti": 12282, "rtx4070tisuper": 16376, "rtx4080": 16376, "rtx4080super": 16376, "rtx4090": 24564,
    "rtx5060": 8151, "rtx5060ti": 8151, "rtx5060ti-16gb": 16311, "rtx5070": 12227, "rtx5070ti": 16303,
    "rtx5080": 16303, "rtx5090": 32607,
    "rtx3050-laptop": 4096, "rtx3060-laptop": 6144, "rtx3070-laptop": 8192, "rtx3070ti-laptop": 8192,
    "rtx3080-laptop": 8192, "rtx3080-16gb-laptop": 16384, "rtx3080ti-laptop": 16384, "rtx4050-laptop": 6141,
    "rtx4060-laptop": 8188, "rtx4070-laptop": 8188, "rtx4080-laptop": 12282, "rtx4090-laptop": 16376,
    "rtx5060-laptop": 8151, "rtx5070-laptop": 8151, "rtx5070ti-laptop": 12227, "rtx5080-laptop": 16303,
    "rtx5090-laptop": 24463,
    "mi210": 65520, "mi250x": 65520, "mi300x": 196592, "rx7900xtx": 24560,
}  # fmt: skip

# what vendors write around a card's name, as in "NVIDIA A100-SXM4-80GB" and "NVIDIA H100 80GB HBM3"
_AROUND = re.compile(r"nvidia|geforce|tesla|quadro|amd|instinct|radeon|generation|gpu|sxm\d?|pcie|hbm\d?e?|[\s_-]")
_PLAIN = {name.replace("-", ""): name for name in CARDS}
_NEAREST = 3


def card_bytes(size: int | str) -> int:
    """Bytes of a card by its name ("rtx4090", "RTX 4090", "A100-80GB"), or of a size ("24GB", "24G", "24", "22GiB").

    A text that is a number alone is in GB (10^9 bytes), as cards are sold; a number is in bytes.

    Raises:
        ValueError: Neither a card that is known nor a size. The message names the nearest cards.
    """
    if not isinstance(size, str):
        return parse_size(size)
    name = _AROUND.sub("", size.lower()).replace("mobile", "laptop")
    known = _card(name)
    if known is not None:
        return CARDS[known] * 2**20
    number = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*g?\s*", size.lower())
    try:
        return parse_size(f"{number[1]}GB" if number else size)
    except ValueError as error:
        nearest = get_close_matches(name, _PLAIN, _NEAREST) or get_close_matches(f"rtx{name}", _PLAIN, _NEAREST)
        near = f"; the nearest are {', '.join(_PLAIN[plain] for plain in nearest)}" if nearest else ""
        raise ValueError(f"{error}; nor is it a card that is known{near}") from None


def _card(name: str) -> str | None:
    """The card of that name, with or without "rtx" and its memory."""
    name = re.sub(r"(?<=\d)g(?=$|laptop)", "gb", name)
    for plain in (name, f"rtx{name}"):
        if plain in _PLAIN:
            return _PLAIN[plain]
        for base in (plain[:-digits] for digits in (3, 4, 5)):
            known = _PLAIN.get(base)
            if known is not None and plain == f"{base}{round(CARDS[known] / 1024)}gb":
                return known
    return None
