"""How the sizes of a step's tensors follow from the sizes of its inputs.

Every count is a *row*: one exact number for each known shape, and last the number for the asked shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations_with_replacement
from math import prod

# A size is at most the product of this many input sizes: batch * height * width, or batch * length * length.
_MOST_FACTORS = 3

Row = tuple[int, ...]


class CannotTell(Exception):
    """The known shapes do not determine something; the text says what, in one line."""


def varying_dimensions(shapes: Sequence[Row]) -> tuple[Row, ...]:
    """The input sizes that vary, each once.

    Args:
        shapes: The input sizes of each known step and of the asked one, all of the same length.

    Returns:
        One row for each dimension. Sizes that are proportional in all steps, such as the lengths of tokens and labels,
        are one dimension.
    """
    found: list[Row] = []
    for row in zip(*shapes, strict=True):
        if len(set(row)) > 1 and not any(_is_proportional(row, known) for known in found):
            found.append(row)
    return tuple(found)


def _is_proportional(row: Row, known: Row) -> bool:
    return all(size * known[0] == row[0] * other for size, other in zip(row, known, strict=True))


class SizeRule:
    """Predicts the sizes of tensors at the asked shape.

    A size is taken to be constant, a multiple of a product of input sizes (`batch * length`, `height / 2`), or such a
    multiple plus a constant (`length + 1`), whichever is the simplest that fits all known shapes.

    Args:
        dimensions: The input sizes that vary, as rows.
    """

    def __init__(self, dimensions: Sequence[Row]) -> None:
        self._products = [
            tuple(map(prod, zip(*factors, strict=True)))
            for count in range(1, _MOST_FACTORS + 1)
            for factors in combinations_with_replacement(dimensions, count)
        ]
        self._answers: dict[Row, int] = {}

    def predict(self, known: Row) -> int:
        """The size at the asked shape.

        Args:
            known: The size at each known shape.

        Raises:
            CannotTell: Rules that fit equally well disagree, none fits, or the size would not be a whole number.
        """
        if known not in self._answers:
            self._answers[known] = self._predict(known)
        return self._answers[known]

    def _predict(self, known: Row) -> int:
        if len(set(known)) == 1:
            return known[0]
        answers = self._multiples(known) or self._multiples_plus_constant(known)
        if not answers:
            raise CannotTell(f"a size is {_listed(known)} at the known shapes, which follows no simple rule")
        if len(answers) > 1:
            raise CannotTell(
                f"a size is {_listed(known)} at the known shapes, which fits more than one rule: "
                "record the step at a shape in which only one of the input sizes is another"
            )
        answer = answers.pop()
        if answer.denominator != 1 or answer < 0:
            raise CannotTell(f"a size is {_listed(known)} at the known shapes, and would be {float(answer):g}")
        return int(answer)

    def _multiples(self, known: Row) -> set[Fraction]:
        answers = set()
        for product in self._products:
            if all(size * product[0] == known[0] * other for size, other in zip(known, product[:-1], strict=True)):
                answers.add(Fraction(known[0] * product[-1], product[0]))
        return answers

    def _multiples_plus_constant(self, known: Row) -> set[Fraction]:
        """Answers of the rules with the smallest constant, since two shapes alone fit them all."""
        least: Fraction | None = None
        answers: set[Fraction] = set()
        for product in self._products:
            fitted = _line(known, product)
            if fitted is None:
                continue
            factor, constant = fitted
            if least is None or abs(constant) < least:
                least, answers = abs(constant), set()
            if abs(constant) == least:
                answers.add(factor * product[-1] + constant)
        return answers


def _line(known: Row, product: Row) -> tuple[Fraction, Fraction] | None:
    """(factor, constant) with `known == factor * product + constant` at all known shapes, or None."""
    other = next((i for i in range(len(known)) if product[i] != product[0]), None)
    if other is None:
        return None
    factor = Fraction(known[other] - known[0], product[other] - product[0])
    constant = known[0] - factor * product[0]
    if factor <= 0 or any(factor * x + constant != size for size, x in zip(known, product[:-1], strict=True)):
        return None
    return factor, constant


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
