"""The generators of Python and numpy, which code may draw from beside torch's."""

from __future__ import annotations

import random
import sys
from typing import Any


class OtherGenerators:
    """The states of these generators when it was made."""

    def __init__(self) -> None:
        self._numpy: Any = sys.modules.get("numpy.random")
        self._python_state, self._numpy_state = self._now()

    def _now(self) -> tuple[Any, Any]:
        return random.getstate(), None if self._numpy is None else self._numpy.get_state()

    def are_as_they_were(self) -> bool:
        """Whether nothing was drawn since."""
        python, numpy = self._now()
        return bool(python == self._python_state and _comparable(numpy) == _comparable(self._numpy_state))

    def restore(self) -> None:
        """Set these states."""
        random.setstate(self._python_state)
        if self._numpy is not None:
            self._numpy.set_state(self._numpy_state)


def _comparable(state: Any) -> Any:
    """A state of numpy, whose array of numbers is compared as bytes."""
    return None if state is None else tuple(x.tobytes() if hasattr(x, "tobytes") else x for x in state)
