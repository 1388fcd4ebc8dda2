"""How an ε is written: never as less than was spent."""

import math
from decimal import ROUND_CEILING, Context


def rounded_up(epsilon: float) -> str:
    """Four digits, or all of a larger whole number."""
    if 1000 <= epsilon < 1e9:
        return f"{math.ceil(epsilon):,}"
    digits = repr(epsilon)  # as it is written: 0.1 itself lies a little above 0.1, and would come to 0.1001
    return f"{float(Context(prec=4, rounding=ROUND_CEILING).create_decimal(digits)):.4g}"
