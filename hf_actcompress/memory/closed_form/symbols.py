"""Reads a number of bytes as a product of a model's sizes.

Every size of a model (its width, its batch, ...) gets a value with a prime factor that no other size has. So the
factors of a number of bytes say of which sizes it is the product; the rest is the coefficient.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

# the names of the sizes in the order of a term's exponents
SYMBOLS = (
    "batch", "seq", "labels", "hidden", "ffn", "vocab", "columns", "rows", "few_rows", "head", "kv_heads", "groups",
    "rank", "positions", "tile", "experts", "active", "layers",
)  # fmt: skip

Term = tuple[int, ...]
# The smallest coefficient that occurs: some codecs store scales of scales, which take the fewest bytes per element.
_LEAST = Fraction(1, 2**13)


@dataclass(frozen=True)
class Size:
    """The value of a size in a probe.

    Args:
        value: The size.
        prime: A factor of it that no other size has.
        inside: Other sizes that are factors of `value`, with the exponents that they have there.
    """

    value: int
    prime: int
    inside: Mapping[str, int]


class Polynomial(dict[Term, Fraction]):
    """A sum of products of sizes: term -> coefficient. Terms whose coefficients add up to zero are left out."""

    def add(self, other: Polynomial, times: int | Fraction = 1) -> None:
        for term, coefficient in other.items():
            total = self.get(term, Fraction(0)) + times * coefficient
            if total:
                self[term] = total
            else:
                self.pop(term, None)

    def plus(self, other: Polynomial, times: int | Fraction = 1) -> Polynomial:
        result = Polynomial(self)
        result.add(other, times)
        return result

    def times(self, name: str) -> Polynomial:
        """Each term with one more factor of that size."""
        place = SYMBOLS.index(name)
        return Polynomial({(*t[:place], t[place] + 1, *t[place + 1 :]): c for t, c in self.items()})


class Reader:
    """Reads numbers of bytes as products of a probe's sizes.

    Args:
        sizes: Name -> size.
        left_over: Numbers of bytes that are skipped: those of the last turns of chunks (`left_over` of probes.py).
    """

    def __init__(self, sizes: Mapping[str, Size], left_over: Container[int] = ()) -> None:
        self._sizes, self._left_over = sizes, left_over
        primes = {size.prime for size in sizes.values()}
        self._plain = [prime for prime in (2, 3, 5) if prime not in primes]
        self._known: dict[int, Polynomial | None] = {}

    def read(self, nbytes: int) -> Polynomial | None:
        """The product; None if the number is no product of sizes."""
        if nbytes not in self._known:
            self._known[nbytes] = self._read(nbytes)
        return self._known[nbytes]

    def total(self, sizes: Iterable[int]) -> Polynomial:
        """The sum of all numbers that can be read."""
        result = Polynomial()
        for size in sizes:
            found = self.read(abs(size))
            if found is not None:
                result.add(found, 1 if size > 0 else -1)
        return result

    def _read(self, nbytes: int) -> Polynomial | None:
        if nbytes in self._left_over:
            return None
        exponents = {}
        for name, size in self._sizes.items():
            exponents[name], rest = 0, nbytes
            while rest and rest % size.prime == 0:
                rest, exponents[name] = rest // size.prime, exponents[name] + 1
        for name, size in self._sizes.items():
            for other, power in size.inside.items():
                exponents[other] -= power * exponents[name]
        coefficient = Fraction(nbytes)
        for name, exponent in exponents.items():
            coefficient /= Fraction(self._sizes[name].value) ** exponent
        if any(exponent < 0 for exponent in exponents.values()) or not self._is_plain(coefficient):
            return None
        if coefficient and coefficient < _LEAST:
            # So small a coefficient is no real one: the last chunk of a loop is shorter, and the number of its bytes
            # can contain the prime factor of a size by chance.
            return None
        term = tuple(exponents.get(name, 0) for name in SYMBOLS)
        return Polynomial({term: coefficient}) if nbytes else Polynomial()

    def _is_plain(self, coefficient: Fraction) -> bool:
        for number in (coefficient.numerator, coefficient.denominator):
            for prime in self._plain:
                while number and number % prime == 0:
                    number //= prime
            if number > 1:
                return False
        return True
