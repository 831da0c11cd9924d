"""What other packages can add: codecs, presets, rules and ops for their own modules, without a change to this one.

    with register_codec("int6", MyCodec()), register_preset("mine", CompressionConfig(mlp="int6")):
        patch_model(model, "mine")

Each function registers at once and returns a `Registration`, whose `remove()` (or whose end as a context) undoes it.
The other names are for the results of rules and for ops of your own; `tests/test_extension_op.py` is a whole example.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .codecs import Codec, TensorMeta
from .codecs.table import CODECS
from .config import PRESETS, CompressionConfig
from .config_checks import check_instance, registered_name
from .errors import RegistrationError, UnknownOptionError
from .models.leaves import ACTIVATION_TYPES, ActivationRow
from .models.rules import OTHERS_RULES, Rule
from .models.sites import Declined, Site
from .modules.base import PatchedModule, Settings, keeps_for_backward
from .ops.first_order import once_differentiable
from .records import applied, declare, load, parameter, record_of, save, stored_exact
from .reference import ACTIVATIONS
from .roles import Role

__all__ = [
    "CODECS",
    "Codec",
    "Declined",
    "PatchedModule",
    "Registration",
    "Role",
    "Rule",
    "Settings",
    "Site",
    "TensorMeta",
    "applied",
    "declare",
    "keeps_for_backward",
    "load",
    "once_differentiable",
    "parameter",
    "record_of",
    "register_activation",
    "register_codec",
    "register_preset",
    "register_rule",
    "save",
    "stored_exact",
]


class Registration:
    """Something that was registered. Use it as a context to have it undone at the end."""

    def __init__(self, remove: Callable[[], Any]) -> None:
        self._remove: Callable[[], Any] | None = remove

    def remove(self) -> None:
        """Undo it. A second time does nothing."""
        if self._remove is not None:
            self._remove()
            self._remove = None

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *args: object) -> None:
        self.remove()


def register_codec(name: str, codec: Codec) -> Registration:
    """Give a codec a name that configs can use in any field for a codec.

    Args:
        name: A new one.
        codec: A frozen dataclass whose base is `Codec`, with `pack`, `unpack` and `nbytes`. `check_codec(codec)` of
            `hf_actcompress.testing` checks that it keeps a codec's promises.

    Raises:
        RegistrationError: The name is taken, or an equal codec has a name already.
        CodecError: It lacks the base or one of the methods, is a class, cannot be hashed, or its `repr` holds an
            address.
    """
    check_instance(codec)
    equal = registered_name(codec)
    if name in CODECS or equal is not None:
        reason = "the name is taken" if equal is None else f"an equal codec is known as {equal!r}"
        raise RegistrationError("codec", name, reason)
    CODECS[name] = codec
    return Registration(lambda: CODECS.pop(name, None))


def register_preset(name: str, config: CompressionConfig) -> Registration:
    """Give a config a name, for `patch_model(model, name)`, `compare_presets` and all else that takes a preset's name.

    Raises:
        RegistrationError: The name is taken, or `config` is no CompressionConfig.
    """
    if not isinstance(config, CompressionConfig):
        raise RegistrationError("preset", name, f"{config!r} is no CompressionConfig", "pass one")
    if name in PRESETS:
        raise RegistrationError("preset", name, "the name is taken")
    PRESETS[name] = config
    return Registration(lambda: PRESETS.pop(name, None))


def register_activation(kind: type[nn.Module], function: str, attributes: tuple[str, ...] = ()) -> Registration:
    """Say which function your own pointwise activation computes. It then keeps what torch's activation keeps.

    Args:
        kind: A class, exactly; subclasses are other classes. Its forward takes x and returns f(x).
        function: A row of `hf_actcompress.reference.ACTIVATIONS`, such as "gelu_new" or "leaky_relu". The values stay
            those of the class's own forward; backward uses the derivative of the row.
        attributes: Names of the instance attributes that hold the row's constants, in the order of the row.

    Raises:
        UnknownOptionError: No such function.
        RegistrationError: The class is known already.
    """
    if function not in ACTIVATIONS:
        raise UnknownOptionError("activation", function, ACTIVATIONS)
    if kind in ACTIVATION_TYPES:
        raise RegistrationError("activation", kind.__name__, "the class is known")
    ACTIVATION_TYPES[kind] = ActivationRow(function, attributes)
    return Registration(lambda: ACTIVATION_TYPES.pop(kind, None))


def register_rule(rule: Rule) -> Registration:
    """Say how modules of your own type are patched. The rule is asked before those of this package.

    Args:
        rule: A function of a module that is not patched yet, and of the config that holds there. It returns a `Site`
            (the mixin that the module's class gets, and the mixin's `Settings`), `Declined` (the reason why the module
            is left alone, for reports), or None for a module that the rule does not know. A mixin of your own is a
            subclass of `PatchedModule`, whose forward calls your op. The mixins of `hf_actcompress.modules` compute
            what torch's own modules compute: a rule may use one only if that holds for its type, too.

    Raises:
        RegistrationError: The rule is registered already.

    `patch_model` raises RuleError if the rule returns something else.
    """
    if rule in OTHERS_RULES:
        raise RegistrationError("rule", getattr(rule, "__name__", repr(rule)), "it is registered already")
    OTHERS_RULES.append(rule)
    return Registration(lambda: OTHERS_RULES.remove(rule) if rule in OTHERS_RULES else None)
