"""What sums of a step's own tensor sizes can be at another shape.

Bytes at a point of a step are a sum of sizes: c0 + c1 * s1 + c2 * s2 + ..., where each s is how a tensor of the step
grows with its shape, and no c is negative. The known shapes say what the sum is there. If that determines the c, the
sum at the asked shape is certain; if not, it lies between two bounds, and the upper one is safe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy

Array = numpy.ndarray[Any, numpy.dtype[Any]]
Term = tuple[Fraction, ...]

_MOST_TERMS = 12  # in a sum: beyond it, finding the bounds takes long, and sizes are nearly multiples of one another
_MOST_TIME_TERMS = 3  # more would follow the noise
_TOLERANCE = 1e-9  # of the numbers that are fitted


@dataclass(frozen=True, slots=True)
class Bounds:
    """What some sums can be at the asked shape.

    If no sum agrees with every known shape (a peak may be the higher of two sums), the bounds lie around the nearest
    one, as far from it as the known shapes do.

    Attributes:
        least: float64 array of shape (sums,).
        most: float64 array of shape (sums,).
    """

    least: Array
    most: Array


def chosen_terms(rows: Sequence[Sequence[int]]) -> Array:
    """The distinct terms among the sizes of a step, with a constant one first.

    Args:
        rows: The sizes, one row for each tensor and one column for each shape. All are positive.

    Returns:
        Float64 array of shape (terms, shapes). Each term is 1 at its largest.
    """
    weights: dict[Term, float] = {}
    for row in rows:
        term = _term(row)
        weights[term] = weights.get(term, 0.0) + max(row)
    constant = _term((1,) * len(rows[0]))
    weights.pop(constant, None)
    heaviest = sorted(weights, key=lambda term: -weights[term])[: _MOST_TERMS - 1]
    return numpy.array([[float(share) for share in term] for term in (constant, *heaviest)])


def _term(row: Sequence[int]) -> Term:
    largest = max(row)
    return tuple(Fraction(size, largest) for size in row)


def bounded_sums(known: Array, terms: Array) -> Bounds:
    """Bounds of sums at the asked shape.

    A sum with fewer terms than there are known shapes hardly agrees with all of them by chance, so it is believed: no
    sum with more terms is tried then. Otherwise, the highest and the lowest sum are among those with as many terms as
    known shapes, since a linear program has its optimum at a basic solution.

    Args:
        known: The sums at the known shapes; float64 array of shape (sums, shapes known).
        terms: Of the sums; float64 array of shape (terms, shapes known + 1), the asked shape last.
    """
    least, most = numpy.full(len(known), numpy.inf), numpy.full(len(known), -numpy.inf)
    scale = numpy.abs(known).max(axis=1)
    near_least, near_most = known.min(axis=1), known.max(axis=1)
    nearest_error = numpy.full(len(known), numpy.inf)
    for count in range(1, known.shape[1] + 1):
        is_open = ~numpy.isfinite(most)
        if not is_open.any():
            break
        for fitted in _fits(known, terms, count):
            short = (known - fitted.known).max(axis=1).clip(min=0)
            over = (fitted.known - known).max(axis=1).clip(min=0)
            error = numpy.maximum(short, over)
            agrees = is_open & fitted.is_sum & (error <= _TOLERANCE * scale + 1e-6)
            least = numpy.where(agrees, numpy.minimum(least, fitted.asked), least)
            most = numpy.where(agrees, numpy.maximum(most, fitted.asked), most)
            nearer = fitted.is_sum & (error < nearest_error)
            nearest_error = numpy.where(nearer, error, nearest_error)
            near_least = numpy.where(nearer, fitted.asked - over, near_least)
            near_most = numpy.where(nearer, fitted.asked + short, near_most)
    fits = numpy.isfinite(most)
    least, most = numpy.where(fits, least, near_least), numpy.where(fits, most, near_most)
    is_certain = fits & (most - least <= _TOLERANCE * scale + 1e-6)
    for chord in _chords(known, terms):
        most = numpy.where(is_certain, most, numpy.maximum(most, chord))
    return Bounds(least, most)


def _chords(known: Array, terms: Array) -> Iterator[Array]:
    """Sums on straight lines between neighbours: where sums bend upwards, as maxima do, these are never too low."""
    for term in terms:
        order = numpy.argsort(term[:-1])
        places = term[:-1][order]
        after = int(numpy.searchsorted(places, term[-1]))
        if 0 < after < len(places):
            share = (term[-1] - places[after - 1]) / (places[after] - places[after - 1])
            yield (1 - share) * known[:, order[after - 1]] + share * known[:, order[after]]


def nearest_sums(known: Array, terms: Array) -> Array:
    """Sums at the asked shape whose squared errors at the known shapes are smallest, for what is measured with noise.

    Args:
        known: As in `bounded_sums`.
        terms: As in `bounded_sums`.

    Returns:
        Float64 array of shape (sums,), not negative.
    """
    best, best_error = numpy.zeros(len(known)), numpy.full(len(known), numpy.inf)
    for count in range(1, min(_MOST_TIME_TERMS, known.shape[1]) + 1):
        for fitted in _fits(known, terms, count):
            error = ((known - fitted.known) ** 2).sum(axis=1)
            better = fitted.is_sum & (error < best_error - 1e-12 * (known**2).sum(axis=1))  # by more than rounding
            best_error = numpy.where(better, error, best_error)
            best = numpy.where(better, fitted.asked, best)
    return best


@dataclass(frozen=True, slots=True)
class _Fit:
    """Least-squares fits of all sums with the same few terms: at the known shapes, and at the asked one."""

    known: Array
    asked: Array
    is_sum: Array


def _fits(known: Array, terms: Array, count: int) -> Iterator[_Fit]:
    """One fit for each choice of this many terms that the known shapes tell apart."""
    for chosen in combinations(range(len(terms)), count):
        columns = terms[list(chosen)]
        basis = columns[:, :-1]
        if numpy.linalg.matrix_rank(basis, tol=1e-9) < count:
            continue
        factors = known @ numpy.linalg.pinv(basis)
        is_sum = (factors >= -_TOLERANCE * numpy.abs(known).max(axis=1, keepdims=True)).all(axis=1)
        yield _Fit(factors @ basis, factors @ columns[:, -1], is_sum)
