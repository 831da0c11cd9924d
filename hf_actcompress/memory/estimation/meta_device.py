"""Makes models on the meta device in a given dtype and leaves torch's defaults alone.

The default dtype belongs to the process. transformers sets it while it makes a model, so a training in another thread
would make its tensors in that dtype. This mode belongs to its own thread.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

# these functions take the dtype of data that has one
_OF_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
_DEFAULT = "get_default_dtype"
# while torch works on a fake tensor or one of the meta device, it sets a global and restores it: two threads at once
# would restore each other's values
ONE_AT_A_TIME = threading.RLock()


class OnMeta(TorchFunctionMode):
    """Puts new tensors without a given device on the meta device, and makes those of the default dtype in `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype, self._default = dtype, torch.get_default_dtype()
        self._constructors = _device_constructors()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        made = func in self._constructors
        if made and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor) or result.dtype != self._default or self._dtype == self._default:
            return result
        # a function whose code names the default dtype asks for that dtype on purpose
        asked = _DEFAULT in sys._getframe(1).f_code.co_names
        if made and (asked or kwargs.get("dtype") is None) and not (func in _OF_DATA and hasattr(args[0], "dtype")):
            return func(*args, **{**kwargs, "dtype": self._dtype})
        return result.to(self._dtype) if func is Tensor.to and asked else result
