"""Which module of a model a node of its graph belongs to, for reports."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from .policy import is_view

# key in `node.meta`: the id of the module that a packed value belongs to
_MODULE = "actcompress_module"


def module_reading(x: Node) -> str:
    """The id of the module whose forward first reads x or a view of it; if none does, of the one that computes x."""
    views, readers = [x], list[Node]()
    for node in views:
        views += filter(is_view, node.users)
        readers += (user for user in node.users if not is_view(user) and running(user) is not None)
    return running(min(readers, default=x)) or ""


def running(node: Node) -> str | None:
    """The id of the innermost module that was running, from Dynamo's notes; None if they say nothing."""
    modules = node.meta.get("nn_module_stack")
    found = node.meta.get(_MODULE) or (next(reversed(modules)) if modules else None)
    return None if found is None else str(found)


def attributed(nodes: Sequence[Node], like: Node) -> None:
    """Note that these nodes belong to the module that reads `like`."""
    key = module_reading(like)
    for node in nodes:
        node.meta[_MODULE] = key
