"""A table of optimizers: the bytes of their states, and of the temporary tensors of their own step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ....errors import UnknownOptionError
from ....quick.optimizers import FOREACH, OF_TRAINER

# bitsandbytes' blockwise 8-bit states: one fp32 scale per block; tensors below the second size stay in fp32
_BLOCK, _SMALLEST = 256, 4096


@dataclass(frozen=True)
class OptimizerRule:
    """What an optimizer keeps for one trainable parameter from its first step on, and its step's temporary tensors.

    Args:
        states: Gives the sizes in bytes of the states of a parameter.
        what: A description of the states, for users.
        step: Gives the sizes of the tensors that a step holds at the same time beside states and gradients. Its
            arguments are all parameters in order, and whether they are on a CUDA device.
        of_table: The same as `states` for the weight of an `nn.Embedding`; None: no different.
    """

    states: Callable[[Tensor], Iterable[int]]
    what: str
    step: Callable[[Sequence[Tensor], bool], Iterable[int]] = lambda parameters, cuda: ()
    of_table: Callable[[Tensor], Iterable[int]] | None = None

    def of_model(self, model: nn.Module, part: Callable[[Tensor], Tensor] = lambda p: p) -> Iterator[int]:
        """Sizes of the states of all trained parameters. `part` gives the part of one that this process holds."""
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        for p in model.parameters():
            if p.requires_grad:
                states = self.of_table if self.of_table is not None and id(p) in tables else self.states
                yield from states(part(p))


def _fused_adamw(p: Tensor) -> Iterable[int]:
    # two moments, and a step count in fp32
    return [p.nbytes, p.nbytes, 4]


def _one_moment(p: Tensor) -> Iterable[int]:
    # and a step count in fp32
    return [p.nbytes, 4]


def _in_32_bits(moments: int) -> Callable[[Tensor], Iterable[int]]:
    return lambda p: [4 * p.numel()] * moments


def _in_8_bits(moments: int) -> Callable[[Tensor], Iterable[int]]:
    def states(p: Tensor) -> Iterable[int]:
        n = p.numel()
        return [n, 4 * -(-n // _BLOCK)] * moments if n >= _SMALLEST else [4 * n] * moments

    return states


def _bitsandbytes(name: str, moments: int, what: str) -> dict[str, OptimizerRule]:
    """An optimizer of bitsandbytes with states in 32 and in 8 bits."""
    wide = _in_32_bits(moments)
    return {
        f"{name}_32bit": OptimizerRule(wide, f"{what} in fp32, as bitsandbytes keeps them"),
        # the Trainer tells bitsandbytes to keep those of embeddings in fp32
        f"{name}_8bit": OptimizerRule(
            _in_8_bits(moments), f"{what} in 8 bits, as bitsandbytes keeps them under the Trainer", of_table=wide
        ),
    }


def _adafactor(p: Tensor) -> Iterable[int]:
    if p.dim() < 2:
        return [4 * p.numel(), 4]
    # row and column sums, and a root mean square
    return [4 * (p.numel() // max(1, p.size(-1))), 4 * (p.numel() // max(1, p.size(-2))), 4]


def _foreach(parameters: Sequence[Tensor], cuda: bool) -> Iterable[int]:
    """The square roots of the second moments: on CUDA those of all at once; on a CPU, one parameter after the other."""
    if cuda:
        return [p.nbytes for p in parameters]
    return _in_turn([p.nbytes for p in parameters], 2)


def _adafactor_step(parameters: Sequence[Tensor], cuda: bool) -> Iterable[int]:
    """Squares and updates of one parameter in fp32, and fp32 copies of it and its gradient if they are narrower."""
    # the previous parameter's temporary tensors are still alive
    sizes = [4 * p.numel() for p in parameters]
    copies = 2 if all(p.itemsize >= 4 for p in parameters) else 4
    return _in_turn(sizes, copies)


def _in_turn(sizes: Sequence[int], copies: int) -> Iterable[int]:
    return max(
        ([*[size] * copies, before] for size, before in zip(sizes, [0, *sizes], strict=False)), key=sum, default=[]
    )


OPTIMIZERS: dict[str, OptimizerRule] = {
    "adamw": OptimizerRule(_fused_adamw, "two moments in the parameter's dtype, as torch's fused AdamW keeps them"),
    FOREACH: OptimizerRule(
        _fused_adamw, 'the same, as torch\'s AdamW keeps them that is not fused (optim="adamw_torch")', _foreach
    ),
    **_bitsandbytes("adamw", 2, "two moments"),
    "adafactor": OptimizerRule(
        _adafactor,
        "row and column sums in fp32 and no momentum, as transformers' Adafactor keeps them",
        _adafactor_step,
    ),
    "sgd_momentum": OptimizerRule(lambda p: [p.nbytes], "one moment in the parameter's dtype"),
    "sgd": OptimizerRule(lambda p: [], "nothing"),
    "adagrad": OptimizerRule(_one_moment, "sums of squares in the parameter's dtype"),
    "rmsprop": OptimizerRule(_one_moment, "mean squares in the parameter's dtype"),
    **_bitsandbytes("rmsprop", 1, "mean squares"),
    **_bitsandbytes("lion", 1, "one moment"),
    **_bitsandbytes("ademamix", 3, "three moments"),
}


def optimizer_rule(name: str) -> OptimizerRule:
    """The row for that name, or for the name that transformers' Trainer has for it. Raises UnknownOptionError."""
    row = OF_TRAINER.get(name, name)
    if row not in OPTIMIZERS:
        from transformers.training_args import OptimizerNames

        trainers = name in {known.value for known in OptimizerNames}
        what = "number of bytes of the Trainer's optimizer" if trainers else "optimizer"
        raise UnknownOptionError(what, name, [*OPTIMIZERS, *OF_TRAINER])
    return OPTIMIZERS[row]
