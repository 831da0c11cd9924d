"""The exception tree. Every message says what was asked, what was found and what to do."""

from __future__ import annotations

from collections.abc import Iterable


class ActCompressError(Exception):
    """Base of every error that this package raises on purpose."""


class UnknownOptionError(ActCompressError, ValueError):
    """An option, preset, field or codec that does not exist, or a value that does not go with the other options."""

    def __init__(self, what: str, asked: object, known: Iterable[object], *, refused: bool = False) -> None:
        listed = ", ".join(repr(name) for name in known)
        if refused:
            super().__init__(f"{what} cannot be {asked!r}; allowed: {listed}")
        else:
            super().__init__(f"unknown {what} {asked!r}; known: {listed}")


class RegistrationError(ActCompressError, ValueError):
    """A name is registered that is taken or was registered before, or an object of the wrong kind is registered."""

    def __init__(
        self, what: str, name: str, reason: str, do: str = "choose another name, or remove() the first one"
    ) -> None:
        super().__init__(f"the {what} {name!r} was not registered: {reason}; {do}")


class RuleError(ActCompressError, TypeError):
    """A rule that was registered from outside gave an answer that no module can be patched with."""


class NothingPatchedError(ActCompressError, ValueError):
    """No module of the model could be patched, and `strict` was set."""


class UnsupportedModelError(ActCompressError, ValueError):
    """The model is in a state in which it cannot be patched: wrapped by DDP or FSDP, on the meta device."""


class NotPatchedError(ActCompressError, ValueError):
    """A report or an unpatch was asked for a model that was not patched."""


class PaddingError(ActCompressError, RuntimeError):
    """Under `drop_padding=True` a dropped padding row was needed, so the gradients of that backward are wrong."""


class SharedRowsError(ActCompressError, RuntimeError):
    """Under `share_prompts=True` rows that were kept once differed, so the gradients of that backward are wrong."""


class CaptureError(ActCompressError, RuntimeError):
    """A CUDA graph captures code that draws the same random numbers again in backward, which is not possible there."""


class CodecError(ActCompressError, ValueError):
    """A codec got a tensor that it cannot store, or an object that is no codec was given as one."""


class KernelUnavailableError(ActCompressError, RuntimeError):
    """An implementation was chosen by name and cannot be used on this device."""


class MeasurementError(ActCompressError, RuntimeError):
    """Memory cannot be measured here: no allocator events, or a device without allocator statistics."""


class MissingExtraError(ActCompressError, ImportError):
    """A feature needs an optional dependency which is not installed."""


class ModelConfigError(ActCompressError, ValueError):
    """No config can be found for the name of a model, or no model can be built from it."""


class DoesNotFitError(ActCompressError, ValueError):
    """No plan fits the budget. `missing_bytes`: by how much the smallest plan exceeds it. `batch_size`, `seq_len`: the
    largest that would fit with the other one as asked, 0 if none would."""

    def __init__(self, message: str, missing_bytes: int, batch_size: int, seq_len: int) -> None:
        super().__init__(message)
        self.missing_bytes, self.batch_size, self.seq_len = missing_bytes, batch_size, seq_len


def first_line(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
