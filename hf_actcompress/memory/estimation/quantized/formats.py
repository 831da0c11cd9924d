"""How quantised weights are stored, by what a `quantization_config` of transformers says.

| method | a weight | beside the weights | in use |
|---|---|---|---|
| bitsandbytes | 4 bits | fp32 per 64; if doubly quantised 8 bits, and fp32 per 256 of these | a copy per product |
| the same | 8 bits | fp32 per output feature | the same, and the input is held |
| GPTQ, AWQ | its `bits` | 16 + `bits` per group | a copy per product |
| torchao | 8 bits | fp32 per output feature or group, zero points of int8 | the copy is held for the backward |
| the same | 4 bits | two values of 16 bits per group | a copy per product |
| mxfp4 | 4 bits | 8 bits per 32 | a copy of a layer's experts |

Other methods raise an error that names them. No weight is counted as 16 bits only because its method is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ....errors import ModelConfigError

# bitsandbytes: weights per scale, and scales per second-level scale (double quantisation)
BLOCK, _SCALES = 64, 256


@dataclass(frozen=True)
class Format:
    """How the weights of a layer are stored.

    Args:
        bits: Bits of a weight.
        group: How many weights share a scale; 0: all weights of an output feature do.
        scale_bits: Bits of a scale together with its zero point.
        double: Whether the scales are stored in 8 bits, with scales of their own.
        holds_input: Whether the product keeps its input for backward.
        holds_copy: Whether the 16-bit copy of the weight is kept for backward. Autograd keeps it where the product is
            made of plain ops.
        scales_product: Whether the product is multiplied by the scales, so that the copy is without them.
        experts: Whether it is a format of stacked experts; linear layers stay as they are.
        note: Why transformers does not train on top of such weights; empty if it does.
    """

    bits: int
    group: int
    scale_bits: int
    double: bool = False
    holds_input: bool = False
    holds_copy: bool = False
    scales_product: bool = False
    experts: bool = False
    note: str = ""

    def codes(self, count: int) -> int:
        """Bytes of the codes of `count` weights."""
        return -(-count * self.bits // 8)

    def scales(self, outputs: int, inputs: int) -> list[int]:
        """Bytes of each tensor that is stored beside the codes."""
        count = outputs if not self.group else -(-outputs * inputs // self.group)
        if not self.double:
            return [count * self.scale_bits // 8]
        return [count, 4 * -(-count // _SCALES)]


# formats that can be asked for by name, without a config
FORMATS = {
    "nf4": Format(4, BLOCK, 32, double=True),
    "fp4": Format(4, BLOCK, 32),
    "int8": Format(8, 0, 32, holds_input=True),
}
MXFP4 = Format(4, 32, 8, experts=True, note=(
    "transformers does not train experts in mxfp4: they are estimated as packed, with a copy of one layer's in 16 bits "
    'at a time. Mxfp4Config(dequantize=True) trains them in 16 bits (quantization={"quant_method": "mxfp4", '
    '"dequantize": True})'
))  # fmt: skip
# by the name of torchao's config without "Config", or by its older name without "_"; other kinds are missing because
# their products have no gradient
TORCHAO = {
    "int8weightonly": Format(8, 0, 40, holds_copy=True, scales_product=True),
    "float8weightonly": Format(8, 0, 32, holds_copy=True),
    "int4weightonly": Format(4, 128, 32, note=(
        "transformers trains on top of torchao's weights of 8 bits, not of 4: these are estimated as packed, with a "
        "copy of one in 16 bits for each product"
    )),
}  # fmt: skip
_KNOWN = "bitsandbytes, gptq, awq, torchao and mxfp4 are"


def options_of(config: Any) -> Mapping[str, Any]:
    """The options of a `quantization_config` as a dict; an empty one if `config` is a name."""
    if isinstance(config, str):
        return {}
    found: Mapping[str, Any] = config if isinstance(config, dict) else {**vars(config), **config.to_dict()}
    return found


def method_of(config: Any) -> str:
    """The method of a `quantization_config`, as an object or a dict, or of a name ("nf4", "fp4", "int8")."""
    stated = options_of(config).get("quant_method") or "bitsandbytes"
    method = str(getattr(stated, "value", stated)).lower()
    return "bitsandbytes" if method.startswith("bitsandbytes") else method


def format_of(config: Any) -> Format | None:
    """The format of a `quantization_config`, as an object or a dict, or of a name ("nf4", "fp4", "int8").

    Returns None if the config says that the weights are loaded in 16 bits. Raises ModelConfigError for a method whose
    bytes are not known here.
    """
    if isinstance(config, str):
        if config not in FORMATS:
            raise ModelConfigError(f"unknown quantisation {config!r}; known: {', '.join(FORMATS)}")
        return FORMATS[config]
    options, method = options_of(config), method_of(config)
    if method == "bitsandbytes":
        if options.get("load_in_8bit"):
            return FORMATS["int8"]
        return Format(4, BLOCK, 32, double=bool(options.get("bnb_4bit_use_double_quant")))
    if method in ("gptq", "awq"):
        bits, group = int(options.get("bits", 4)), int(options.get("group_size", 128))
        return Format(bits, max(group, 0), 16 + bits)
    if method == "torchao":
        return _torchao(options)
    if method == "mxfp4":
        return None if options.get("dequantize") else MXFP4
    raise ModelConfigError(f"weights quantised by {method!r} are not estimated; {_KNOWN}")


def _torchao(options: Mapping[str, Any]) -> Format:
    stated = options.get("quant_type")
    data: Mapping[str, Any] = options.get("quant_type_kwargs") or {}
    if isinstance(stated, Mapping):
        stated = stated.get("default", stated)
        stated, data = stated.get("_type"), stated.get("_data") or {}
    name = str(stated).lower().replace("_", "").removesuffix("config")
    if name not in TORCHAO or options.get("include_input_output_embeddings"):
        what = "its embeddings" if name in TORCHAO else repr(stated)
        raise ModelConfigError(f"weights quantised by torchao with {what} are not estimated; {', '.join(TORCHAO)} are")
    found, granularity = TORCHAO[name], data.get("granularity")
    inside = granularity.get("_data") or {} if isinstance(granularity, Mapping) else {}
    group = data.get("group_size") or inside.get("group_size")
    # with groups, the copy of the weight is multiplied by the scales, and the product is not
    return replace(found, group=int(group), scales_product=False) if group else found
