"""Liger's kernels in one model only. Liger's own patch of an instance also replaces names in transformers' modules."""

import inspect
import sys
from types import FunctionType, MethodType
from typing import Any


def has_kernels(model_type: str) -> bool:
    """Whether Liger has kernels for models of that type. Liger leaves others unchanged without saying so."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return model_type in MODEL_TYPE_TO_APPLY_LIGER_FN


def apply_liger(model: Any) -> Any:
    """Liger's defaults (norms, MLPs, RoPE, the loss fused with the head) in this model, in place."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    bare = model.get_base_model() if hasattr(model, "peft_config") else model
    names = vars(sys.modules[type(bare).__module__])
    before = dict(names)
    try:
        _apply_liger_kernel_to_instance(model=bare)
        replaced = {name: value for name, value in names.items() if before.get(name) is not value}
    finally:
        names.update(before)
    for module in bare.modules():
        # without its decorators, which handle old names of arguments
        forward = inspect.unwrap(type(module).forward)
        own = "forward" in vars(module) or forward.__globals__ is not names
        # the attention calls RoPE by its name
        if not own and replaced.keys() & forward.__code__.co_names:
            module.forward = MethodType(_seeing(forward, {**before, **replaced}), module)
    return model


def _seeing(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    """The same function with other globals."""
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
