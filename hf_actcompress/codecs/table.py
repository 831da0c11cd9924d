"""The codecs by name. A new codec is a file beside this one and a row here; the contract tests iterate the rows."""

from __future__ import annotations

from ..methods.actnn.codec import IntRanked
from ..methods.block_sparse.codec import BlockSparse
from ..methods.gact.codec import IntMeasured
from ..methods.mesa.codec import IntRunning
from ..methods.pooled.codec import Pooled
from ..methods.row_sample.codec import RowSample
from ..methods.topk.codec import TopK
from . import IDENTITY, Float8, IntChannels, IntFine, IntGroup, Offload
from .codec import Codec

CODECS: dict[str, Codec] = {
    "identity": IDENTITY,
    # for any field of a config
    "int8": IntGroup(8),
    "int4": IntGroup(4),
    "int3": IntGroup(3, group_size=32),
    "int2": IntGroup(2, group_size=32),
    "int8_stochastic": IntGroup(8, rounding="stochastic"),
    "int4_stochastic": IntGroup(4, rounding="stochastic"),
    "int2_stochastic": IntGroup(2, group_size=32, rounding="stochastic"),
    "int4_32": IntGroup(4, group_size=32),
    "int8_outliers": IntGroup(8, outliers=4),
    "int4_outliers": IntGroup(4, outliers=4),
    # the residual stream without its outliers has nearly one range everywhere, so larger groups cost little
    "int4_128_outliers": IntGroup(4, group_size=128, outliers=4),
    "int3_outliers": IntGroup(3, group_size=32, outliers=4),
    "int2_outliers": IntGroup(2, group_size=32, outliers=4),
    # for q, k and v where scores are not scaled
    "int10": IntFine(),
    # these group tokens, and are for q, k and v
    "int4_channels": IntChannels(4),
    "int5_channels": IntChannels(5),
    # the papers' own quantisers: ActNN, Mesa, GACT
    "int2_ranked": IntRanked(),
    "int8_running": IntRunning(),
    "int4_measured": IntMeasured(4),
    "fp8_e4m3": Float8("e4m3"),
    "fp8_e5m2": Float8("e5m2"),
    "fp8_e4m3_row": Float8("e4m3", group_size=None),
    "fp8_e4m3_16": Float8("e4m3", group_size=16),
    "offload": Offload(),
    "offload_int8": Offload(IntGroup(8)),
    "offload_int4": Offload(IntGroup(4)),
    "offload_fp8": Offload(Float8("e4m3")),
    # for inputs of linear layers only
    "topk10": TopK(0.1),
    "topk20": TopK(0.2),
    "topk30": TopK(0.3),
    "topk10_global": TopK(0.1, scope="global"),
    "topk10_nsigma": TopK(0.1, scope="nsigma"),
    "block30": BlockSparse(0.3),
    "block50": BlockSparse(0.5),
    "block30_row": BlockSparse(0.3, quota="row"),
    "block30_global": BlockSparse(0.3, quota="global"),
    "pool2": Pooled(2),
    "pool4": Pooled(4),
    "pool2x2": Pooled(2, layout="image"),
    "pool4x4": Pooled(4, layout="image"),
    "wtacrs30": RowSample(0.3),
    "wtacrs10": RowSample(0.1),
    "crs30": RowSample(0.3, winner_take_all=False),
    "sampled30": RowSample(0.3, draws="stratified"),
}

# attention whose scores are not scaled uses these codecs instead: errors of queries and keys count more there
FOR_UNSCALED_SCORES = {"int8": "int10"}
