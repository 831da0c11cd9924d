"""A module as it was in the forward, for ops that run its code again in backward.

Between forward and backward a module may change: `eval()`, another adapter, frozen weights, another rate of dropout,
`unpatch_model`. So backward does not read the module. It runs a copy of it that is made from a snapshot, with the
attributes, the children and the weights of the forward.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache, partial
from typing import Any

from torch import Tensor, nn

from ..records import tensors_in

# hooks have seen the forward, so the copies have none
_NO_HOOKS: dict[str, Any] = dict.fromkeys(
    ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"), OrderedDict()
)
# where PEFT notes which adapters it has added to a weight, which it writes through `.data`, so that no version shows it
MERGED = "merged_adapters"
_CONTAINERS = frozenset({dict, list, set})
_Code = Callable[[Any], Callable[..., Any]]


class Snapshot:
    """A module and its children as they are now, and the code that runs on copies of them.

    The copies read aliases of the weights, and gradients are those of the aliases. So hooks on the weights see only one
    gradient, which the op returns, and not the gradients of each run.

    Args:
        module: The module whose code runs again.
        code: Takes a copy of the module, and returns the function that runs again.
        weights: Which weights the op returns gradients for: "all", "own" (not those of children), or "none".
        buffers: Whether buffers count as weights.
        without: Modules whose own tensors do not count.

    Attributes:
        tensors: These weights, each once, in the order of the op's arguments.
        is_closed: Whether the copies call only each other. A child whose `forward` was replaced may call any module,
            and its gradients would be lost.
    """

    __slots__ = (
        "_code",
        "_index",
        "_lists",
        "_parts",
        "_versions",
        "_weights",
        "_without",
        "_wrap",
        "is_closed",
        "tensors",
    )

    def __init__(
        self,
        module: nn.Module,
        code: _Code,
        weights: str = "all",
        buffers: bool = False,
        without: Collection[nn.Module] = (),
    ) -> None:
        self._code, self._without = code, without
        self._wrap: Callable[[nn.Module, Callable[..., Any]], Callable[..., Any]] | None = None
        self.tensors: list[Tensor] = []
        # by the id of a weight: its place in `tensors`, if it has one
        self._index: dict[int, int] = {}
        # by the id of a parameter: the parameter, its data, and whether it wants a gradient
        self._weights: dict[int, tuple[Tensor, Tensor, bool]] = {}
        # for each module, the root first: itself, its class and its attributes
        self._parts: list[tuple[nn.Module, type[nn.Module], dict[str, Any]]] = []
        # attributes that are lists of modules: the module that has it, and its name
        self._lists: list[tuple[int, str]] = []
        self._add(module, {}, {id(module)}, weights, buffers)
        self.is_closed = not any(["forward" in state for _, _, state in self._parts[1:]])
        self._versions = [x._version for x in self.tensors]

    def _add(self, module: nn.Module, configs: dict[int, Any], known: set[int], weights: str, buffers: bool) -> None:
        state = module.__dict__.copy()
        # a compiled call, or one that a report has put there, runs the module itself
        state.pop("_compiled_call_impl", None)
        for name, value in module.__dict__.items():
            kind: Any = type(value)
            if (kind is list or kind is tuple) and any([isinstance(x, nn.Module) for x in value]):
                self._lists.append((id(module), name))
            elif kind in _CONTAINERS:
                state[name] = value.copy()
            elif _is_config(kind):
                if id(value) not in configs:
                    configs[id(value)] = with_attributes(kind, value.__dict__)
                state[name] = configs[id(value)]
        self._parts.append((module, type(module), state))
        for x in state["_parameters"].values():
            if x is not None and id(x) not in self._weights:
                # the data of now, as stock's views keep it: a later `param.data = ...` changes only the parameter
                self._weights[id(x)] = x, x.detach() if type(x) is nn.Parameter else x, x.requires_grad
        if weights != "none" and module not in self._without:
            self._count(state["_parameters"].values())
            self._count(state["_buffers"].values() if buffers else ())
        for child in state["_modules"].values():
            if child is not None and id(child) not in known:
                known.add(id(child))
                self._add(child, configs, known, "none" if weights == "own" else weights, buffers)

    def _count(self, tensors: Iterable[Tensor | None]) -> None:
        for x in tensors:
            if x is not None and id(x) not in self._index:
                self._index[id(x)] = len(self.tensors)
                self.tensors.append(x)

    def around(self, wrap: Callable[[nn.Module, Callable[..., Any]], Callable[..., Any]]) -> None:
        """Let the copies of children run `wrap(child, its forward)` in the place of their forward."""
        self._wrap = wrap

    def replace(self, module: nn.Module, name: str, value: Any) -> None:
        """Let the copies of a module have another value for an attribute."""
        for part, _, state in self._parts:
            if part is module:
                state[name] = value

    def replace_class(self, module: nn.Module, kind: type[nn.Module]) -> None:
        """Let the copies of a module be of another class."""
        self._parts = [(part, kind if part is module else its, state) for part, its, state in self._parts]

    def are_the_same(self) -> bool:
        """Whether no weight has been modified in place since, and no adapter was merged into one."""
        merged = [(vars(module).get(MERGED), state.get(MERGED)) for module, _, state in self._parts]
        return [x._version for x in self.tensors] == self._versions and all(now == then for now, then in merged)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the code on a copy of the module, with the weights of the forward."""
        return self.run(None, *args, **kwargs)

    def run(self, others: Sequence[Tensor] | None, /, *args: Any, **kwargs: Any) -> Any:
        """Run the code on a copy of the module that reads `others` in place of `tensors`; None: aliases of these."""
        weights = {i: x if data is x else alias(data, needed) for i, (x, data, needed) in self._weights.items()}
        if others is not None:
            weights.update((i, others[place]) for i, place in self._index.items())
        twins = {id(module): with_attributes(kind, state) for module, kind, state in self._parts}
        for twin in twins.values():
            vars(twin).update(_NO_HOOKS)
            for name, of in (("_parameters", weights), ("_buffers", weights), ("_modules", twins)):
                vars(twin)[name] = {key: of.get(id(x), x) for key, x in vars(twin)[name].items()}
        for owner, name in self._lists:
            held = vars(twins[owner])
            held[name] = type(held[name])(twins.get(id(x), x) for x in held[name])
        for module, _, _ in self._parts[1:] if self._wrap is not None else ():
            copied: Any = twins[id(module)]
            vars(copied)["forward"] = self._wrap(module, copied.forward)  # type: ignore[misc]
        return self._code(next(iter(twins.values())))(*args, **kwargs)


def refuse_merges(adapters: Sequence[nn.Module], outputs: Any) -> None:
    """Let the backward of outputs, which computes adapted weights again, raise an error if they were merged by then.

    Args:
        adapters: Layers of PEFT.
        outputs: What has been computed with their weights: a tensor, or nested tensors.
    """
    merged = [(adapter, list(vars(adapter)[MERGED])) for adapter in adapters]
    node = next((x.grad_fn for x in tensors_in(outputs) if x.grad_fn is not None), None) if merged else None
    if node is not None:
        node.register_prehook(partial(_refuse, merged))


def _refuse(merged: Sequence[tuple[nn.Module, list[str]]], _: Any) -> None:
    if any(vars(adapter)[MERGED] != then for adapter, then in merged):
        raise RuntimeError(
            "an adapter was merged into a weight, or taken out of one, between a forward and its backward, which "
            "computes with that weight again; merge adapters after the backward"
        )


def of_function(function: Callable[..., Any]) -> Snapshot:
    """The same for a function that reads no module."""
    return Snapshot(nn.Module(), lambda _: function)


@cache
def _is_config(kind: Any) -> bool:
    """Whether it is a class of configs: dataclasses whose values may change."""
    how = getattr(kind, "__dataclass_params__", None)
    return how is not None and not (how.frozen or issubclass(kind, dict))


def with_attributes(kind: Any, state: dict[str, Any]) -> Any:
    """An object of that class with these attributes."""
    # FSDP2's classes make a new module of the class that they shard
    twin = object.__new__(kind) if issubclass(kind, nn.Module) else kind.__new__(kind)
    vars(twin).update(state)
    return twin


def alias(x: Tensor, needed: bool) -> Tensor:
    """A leaf with x's data."""
    return x.detach().requires_grad_(needed)
