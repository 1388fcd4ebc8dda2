"""Exact, vectorised sampler of a discrete Gaussian with a large parameter.

The pmf on the integers is proportional to exp(−z²/2σ²) with σ = 256·k for an integer k of at least 2^24. A magnitude
is m = k·h + l: h is drawn from a table with the pmf of a discrete Gaussian of parameter 256, l is uniform on 0..k−1,
and the pair is accepted with probability exp(−t), t = x(2h + x)/2^17, x = l/k. The sign is a fair bit, and −0 is
rejected. (Sampling by magnitude in two parts: Ducas et al., CRYPTO 2013.)

Every decision compares random bits with integers. If the bits read first do not decide (about one value in 10^5), 512
further bits of the stream and arithmetic with 100 digits do. So results are the same on every machine.

Guarantee: for |z| < 16σ every probability is within a factor 1 ± 2^-60 of the discrete Gaussian's. Larger values, which
a Gaussian would take with probability 2^-189, do not occur. docs/privacy.md derives the resulting change of ε and δ.
"""

import decimal
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdsl.utils.random import RandomBits

TABLE_SIGMA = 256  # parameter of the table of high parts
HIGH_BITS = 12  # high parts are below 2^12, so |z| < 16σ
CELL_BITS = 244  # resolution of a table cell; with HIGH_BITS, probabilities are multiples of 2^-256
FIRST_BITS = 20  # of the CELL_BITS, compared first
MIN_SCALE_BITS = 24  # k is at least 2^24 and at most 2^25
BLOCK = 32768  # candidates per call, so that their arrays fit the cache
# Relative to a Gaussian rounded to integers: 2^-60 of the sampler plus 2^-60 of the discrete Gaussian.
MASS_ERROR = 2.0**-59

Values = NDArray[np.float64]  # integers below 2^53
LOWER = 0 if sys.byteorder == "little" else 1  # index of the lower half in a word of 64 bits


class _Table(NamedTuple):
    """Walker's alias table of the high parts: cell i is i below its threshold, else its alias."""

    thresholds: list[int]  # of 2^CELL_BITS
    first: NDArray[np.uint32]  # their first FIRST_BITS
    alias: NDArray[np.int32]
    surely: NDArray[np.uint32]  # per high part: 31 bits below this accept any low part


def scale(sigma: float) -> tuple[int, int]:
    """Return (k, e) with 256·k·2^e ≥ σ, by at most one part in 2^24. The lattice step is 2^e.

    e = ⌊log2 σ⌋ − 32, so a standard deviation has 2^32 to 2^33 steps.
    """
    mantissa, exponent = np.frexp(sigma)  # σ = mantissa · 2^exponent, mantissa in [1/2, 1)
    e = int(exponent) - 1 - 32
    k = -(-int(float(mantissa) * 2.0**53) // 2 ** (53 - 33 + 8))
    return k, e


def sample(n: int, k: int, bits: RandomBits) -> Values:
    """Draw n values of the discrete Gaussian with parameter 256·k."""
    return sample_rows(n, [k], [bits])[0]


def sample_rows(n: int, scales: Sequence[int], sources: Sequence[RandomBits]) -> list[Values]:
    """Draw n values for each pair of k and a stream; rows do not depend on each other."""
    count = _enough(n)
    words = np.stack([_read(source, count) for source in sources], axis=1)
    z, accepted = _candidates(words, np.array(scales, dtype=np.uint64), sources, 0)
    return [
        _complete(z[row][accepted[row]][:n], n, k, source, count)
        for row, (k, source) in enumerate(zip(scales, sources, strict=True))
    ]


def _enough(n: int) -> int:
    """Number of candidates of which n are nearly always accepted: even, and at most a block."""
    count = min(BLOCK, n + n // 64 + 32)
    return count + count % 2


def _read(bits: RandomBits, count: int) -> NDArray[np.uint32]:
    """Three words of 32 bits for each of `count` candidates: [3, count]."""
    return bits.read(3 * count // 2).astype("<u8", copy=False).view("<u4").reshape(3, count)


def _complete(values: Values, n: int, k: int, bits: RandomBits, index: int) -> Values:
    """Draw until there are n values, starting with candidate number `index`."""
    found = [values]
    missing = n - len(values)
    while missing > 0:
        count = _enough(missing)
        z, accepted = _candidates(_read(bits, count)[:, None], np.array([k], dtype=np.uint64), [bits], index)
        found.append(z[0][accepted[0]][:missing])
        missing -= len(found[-1])
        index += count
    return np.concatenate(found) if len(found) > 1 else values


def _candidates(
    words: NDArray[np.uint32], k: NDArray[np.uint64], sources: Sequence[RandomBits], start: int
) -> tuple[Values, NDArray[np.bool_]]:
    """Return candidates [rows, n] from words [3, rows, n], and whether each is accepted; `start`: first index."""
    table, k = _table(), k[:, None]
    cell = (words[0] >> np.uint32(32 - HIGH_BITS)).astype(np.intp)
    fraction = words[0] & np.uint32(2**FIRST_BITS - 1)
    threshold = table.first.take(cell)
    high = table.alias.take(cell)
    np.copyto(high, cell, where=fraction < threshold, casting="same_kind")
    product = words[1].astype(np.uint64)
    product *= k
    u = words[2] & np.uint32(2**31 - 1)
    tied = fraction == threshold
    accepted = u < table.surely.take(high)
    accepted &= ~tied
    # Lemire: the upper half of a product is uniform on 0..k−1 if its lower half is at least 2^32 mod k
    uniform = product.view(np.uint32)[:, LOWER::2] >= (np.uint64(2**32) % k).astype(np.uint32)
    product >>= np.uint64(32)
    low = product.view(np.int64)
    for row, i in _settle(accepted, uniform, high, low, u, k, tied):
        bits = (int(cell[row, i]), int(fraction[row, i]), int(high[row, i]), int(low[row, i]), int(u[row, i]))
        high[row, i], accepted[row, i] = _decide(*bits, int(k[row, 0]), sources[row].extension(start + i))
    accepted &= uniform
    z = high.astype(np.float64)
    z *= k
    z += low
    if not z.all():  # of 0 and −0, one is rejected
        accepted &= (z != 0) | (words[2] >> np.uint32(31) == 0)
    sign = words[2].astype(np.uint64)
    sign >>= np.uint64(31)
    sign <<= np.uint64(63)
    z.view(np.uint64)[:] |= sign
    return z, accepted


def _settle(
    accepted: NDArray[np.bool_],
    uniform: NDArray[np.bool_],
    high: NDArray[np.int32],
    low: NDArray[np.int64],
    u: NDArray[np.uint32],
    k: NDArray[np.uint64],
    tied: NDArray[np.bool_],
) -> list[tuple[int, int]]:
    """Decide candidates by 1 − t ≤ exp(−t) ≤ 1 − t + t²/2; return the positions of the undecided ones."""
    at = np.nonzero(~accepted & uniform)
    x = low[at] / k[at[0], 0]
    t = x * (2.0 * high[at] + x) * 2.0**-17
    accepts = u[at] + 1.001 <= (1 - t) * 2.0**31
    rejects = u[at] >= (1 - t + t * t / 2) * 2.0**31 + 0.001
    accepted[at] = accepts & ~tied[at]
    left = ~(accepts | rejects) | tied[at]
    return list(zip(at[0][left].tolist(), at[1][left].tolist(), strict=True))


def _decide(cell: int, fraction: int, high: int, low: int, u: int, k: int, extension: int) -> tuple[int, bool]:
    """Decide one candidate with 512 further random bits: return its high part and whether it is accepted."""
    table = _table()
    of_cell, of_u = extension >> 256, extension & (2**256 - 1)
    if fraction == int(table.first[cell]):
        rest = CELL_BITS - FIRST_BITS
        exact = (fraction << rest) | (of_cell >> (256 - rest))
        high = cell if exact < table.thresholds[cell] else int(table.alias[cell])
    with decimal.localcontext() as context:
        context.prec = 100
        t = decimal.Decimal(low * (2 * k * high + low)) / decimal.Decimal(2 * TABLE_SIGMA**2 * k * k)
        return high, decimal.Decimal((u << 256) | of_u) < (-t).exp() * 2**287


@lru_cache(maxsize=1)
def _table() -> _Table:
    """Build the alias table with integers of 384 bits: exp(−h²/2σ²) by repeated multiplication."""
    size, cell, bits = 2**HIGH_BITS, 2**CELL_BITS, 384
    with decimal.localcontext() as context:
        context.prec = 130
        ratio = int((decimal.Decimal(-1) / (2 * TABLE_SIGMA**2)).exp() * 2**bits)
    factor, squared, weights = ratio, ratio * ratio >> bits, [2**bits]
    for _ in range(size - 1):
        weights.append(weights[-1] * factor >> bits)
        factor = factor * squared >> bits
    total = sum(weights)
    mass = [weight * size * cell // total for weight in weights]
    mass[0] += size * cell - sum(mass)
    thresholds, alias = [cell] * size, list(range(size))
    small = [h for h in range(size) if mass[h] < cell]
    large = [h for h in range(size) if mass[h] >= cell]
    while small:
        low, high = small.pop(), large[-1]
        thresholds[low], alias[low] = mass[low], high
        mass[high] -= cell - mass[low]
        if mass[high] < cell:
            small.append(large.pop())
    return _Table(
        thresholds,
        np.array([t >> (CELL_BITS - FIRST_BITS) for t in thresholds], dtype=np.uint32),
        np.array(alias, dtype=np.int32),
        np.array([int((1 - (2 * h + 1) * 2.0**-17) * 2**31) - 1 for h in range(size)], dtype=np.uint32),
    )
