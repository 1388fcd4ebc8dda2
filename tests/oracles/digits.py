"""One round, Gaussian or Poisson-sampled, to forty digits in Python's decimal numbers."""

from decimal import Decimal, localcontext

PRECISION = 80
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")


def normal_above(x: Decimal) -> Decimal:
    """The standard normal's mass above x: a half less the series of the density's integral. For |x| up to 12."""
    term = total = x
    k = 1
    while abs(term) > Decimal(10) ** -PRECISION:
        k += 2
        term *= x * x / k
        total += term
    return Decimal(1) / 2 - total * (-x * x / 2).exp() / (2 * PI).sqrt()


def gaussian_delta(z: Decimal, epsilon: Decimal) -> Decimal:
    """δ of the Gaussian mechanism: Balle and Wang 2018, Theorem 8."""
    half = 1 / (2 * z)
    return normal_above(epsilon * z - half) - epsilon.exp() * normal_above(epsilon * z + half)


def one_round_delta(z: Decimal, q: Decimal, epsilon: Decimal) -> Decimal:
    """δ for a record removed or added, whichever is more: P(L > ε) − e^ε·Q(L > ε)."""

    def crossing(ratio: Decimal) -> Decimal:  # where (1 − q)·N(0, z²) + q·N(1, z²) is that many times N(0, z²)
        return z * z * ((ratio - 1 + q) / q).ln() + Decimal(1) / 2

    x = crossing(epsilon.exp())
    out, in_ = normal_above(x / z), normal_above((x - 1) / z)
    removed = (1 - q) * out + q * in_ - epsilon.exp() * out
    if (-epsilon).exp() <= 1 - q:
        return removed
    x = crossing((-epsilon).exp())
    out, in_ = normal_above(-x / z), normal_above((1 - x) / z)
    return max(removed, out - epsilon.exp() * ((1 - q) * out + q * in_))


def epsilon(z: float, q: float, delta: float) -> float:
    """ε of one round at `delta`, which is 1e-20 or more, rounded to float64."""
    with localcontext() as context:
        context.prec = PRECISION
        z_, q_ = Decimal(z), Decimal(q)
        # from 0 to the loss at 10·z, where the noise has a mass of 1e-23 left
        low, high = Decimal(0), (1 - q_ + q_ * ((10 * z_ - Decimal(1) / 2) / z_**2).exp()).ln()
        while high - low > Decimal(10) ** -30:
            middle = (low + high) / 2
            found = gaussian_delta(z_, middle) if q == 1 else one_round_delta(z_, q_, middle)
            low, high = (middle, high) if found > Decimal(delta) else (low, middle)
        return float(high)
