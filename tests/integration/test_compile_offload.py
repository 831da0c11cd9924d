"""Activations that wait in host memory, in compiled graphs. Devices of other machines are traced with fake tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node

from hf_actcompress import patch_model
from hf_actcompress.codecs.table import CODECS
from hf_actcompress.compilation import transfers
from hf_actcompress.compilation.packing import _Traces
from hf_actcompress.private_apis import offload_ops
from tests.families import BY_NAME, step
from tests.integration.compiling import build, one_graph, same_step

# fp8 is left out: a torch without CUDA cannot trace its casts for a CUDA device
NAMES = [name for name in CODECS if name.startswith("offload") and "fp8" not in name]
PLAIN = torch.ops.prims.device_put.default


def _traced(name: str, device: str) -> tuple[GraphModule, GraphModule, Any]:
    """The graphs that pack and unpack a tensor [2, 3, 16, 64], whose axes are not in the order of its memory.

    A torch that was built without CUDA cannot trace how another order is restored there, so they are in order then.
    """
    with FakeTensorMode():
        shape, ordered = (2, 3, 16, 64), device == "cuda" and torch.version.cuda is None
        x = torch.empty(shape, dtype=torch.bfloat16, device=device)
        x = x if ordered else x.new_empty(2, 16, 3, 64).transpose(1, 2)
    traces, codec = _Traces(), CODECS[name]
    pack, meta = traces.pack(codec, x)
    packed = [node.meta["val"] for node in _results(pack)]
    return pack, traces.unpack(codec, meta, len(packed), packed, x), x


def _results(traced: GraphModule) -> list[Node]:
    output = next(node for node in traced.graph.nodes if node.op == "output")
    return list(output.args[0])


def _targets(traced: GraphModule) -> list[Any]:
    return [node.target for node in traced.graph.nodes]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_packed_is_in_host_memory(name: str, device: str) -> None:
    """All that crosses to backward is, and what is unpacked is as x was: shape, strides, dtype and device."""
    pack, unpack, x = _traced(name, device)
    assert all(node.meta["val"].device.type == "cpu" for node in _results(pack))
    (value,) = (node.meta["val"] for node in _results(unpack))
    assert (value.shape, value.stride(), value.dtype, value.device) == (x.shape, x.stride(), x.dtype, x.device)


@pytest.mark.parametrize("name", NAMES)
def test_torchs_own_ops_copy(name: str) -> None:
    """Each copy has a wait, which reads the source so that nothing frees it before; no plain copy is left."""
    pack, unpack, _ = _traced(name, "cuda")
    if (ops := offload_ops()) is None:
        assert PLAIN in _targets(pack) and PLAIN in _targets(unpack)
        return
    for traced, copy in ((pack, ops.offload.default), (unpack, ops.reload.default)):
        assert PLAIN not in _targets(traced)
        copies = [node for node in traced.graph.nodes if node.target is copy]
        assert copies
        for node in copies:
            (wait,) = node.users
            assert wait.target is ops.wait_tensor.default and wait.args == (node, None, node.args[0])


def test_without_torchs_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "offload_ops", lambda: None)
    assert all(PLAIN in _targets(traced) for traced in _traced("offload", "cuda")[:2])


def test_gradients_on_a_cpu() -> None:
    """The same as those of a compiled model that keeps its activations where they are."""
    family = BY_NAME["llama"]
    model, batch = build(family), family.make_batch("right")
    expected = step(one_graph(patch_model(model)), batch)
    torch._dynamo.reset()
    same_step(step(one_graph(patch_model(model, "offload")), batch), expected, rms_norms=False)
