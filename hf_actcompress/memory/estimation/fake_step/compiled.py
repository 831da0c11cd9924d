"""A compiled step on fake tensors: it uses Inductor's graphs of the model, and no code is generated from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ....compilation.calls import graphs_for
from ....compilation.observation import observed
from ....errors import ModelConfigError
from ....private_apis import FakeTensorMode, run_backward
from ...measurement.allocator import loss_of
from ...measurement.compiled import Names, of_its_own_code
from .cuda_rules import CudaCalls
from .fake_allocator import FakeAllocator
from .setting import Setting


class CompiledStep:
    """The forward of a model as one compiled graph, which can be run again on the same fake tensors.

    Args:
        model: The model on fake tensors, patched or not. It is traced; no code is generated.
        batch: The inputs, on fake tensors.
        mode: The FakeTensorMode of these tensors.
        setting: Whether to trace the calls of a CUDA device, and the forward's autocast.

    Raises:
        ModelConfigError: torch.compile cannot trace the model as one graph.
    """

    def __init__(self, model: nn.Module, batch: dict[str, Any], mode: FakeTensorMode, setting: Setting) -> None:
        self._mode = mode
        self._watcher = _Watcher()
        self._call: Callable[..., Any] | None = None
        self._args: tuple[Any, ...] = ()
        self._results: Sequence[Tensor] = ()
        backend = observed(model, self._watcher)

        def capture(graph: Any, inputs: Any, **options: Any) -> Callable[..., Any]:
            return self._first_call(backend(graph, inputs))

        calls = CudaCalls() if setting.cuda else nullcontext()
        with graphs_for("cuda" if setting.cuda else "cpu"), calls, setting.autocast_context():
            try:
                compiled = torch.compile(of_its_own_code(model), backend=capture, fullgraph=True, dynamic=False)
                loss = loss_of(compiled(**batch))
            except (torch._dynamo.exc.TorchDynamoException, RuntimeError) as error:
                raise ModelConfigError(_help(model, error)) from error
        self._position = list(map(id, self._results)).index(id(loss))
        self._results = ()
        with mode:
            # the backward's graph may be made when it first runs
            run_backward(loss)
        model.zero_grad(set_to_none=True)

    def _first_call(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self._call, self._args = compiled, args
            with self._mode:
                self._results = tuple(compiled(*args))
            return self._results

        return call

    def loss(self, allocator: FakeAllocator) -> Tensor:
        """The loss. What the graph makes is counted, except what a fused kernel holds in registers."""
        assert self._call is not None
        self._watcher.allocator = allocator
        loss: Tensor = self._call(*self._args)[self._position]
        return loss

    def module_of(self, x: Tensor) -> str | None:
        """The name of the module that reads this saved tensor."""
        return self._watcher.module_of(x)


class _Watcher(Names):
    def __init__(self) -> None:
        super().__init__()
        self.allocator: FakeAllocator | None = None

    def fused(self) -> AbstractContextManager[object]:
        return nullcontext() if self.allocator is None else self.allocator.elsewhere()


def _help(model: nn.Module, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return (
        f'{type(model).__name__} cannot be traced as one graph ({reason}), and engine="compile" estimates models that '
        'can; engine="eager" is an upper bound of what the parts of its graph keep'
    )
