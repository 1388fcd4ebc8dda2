"""Learning rates of a run: a number with a schedule, or a function of the round."""

import math
import sys
from collections.abc import Callable
from numbers import Real
from typing import Annotated

from pydantic import PlainSerializer, PlainValidator

from pdsl.settings import ScheduleSettings
from pdsl.utils.errors import PdslError
from pdsl.utils.imports import import_object

RateFunction = Callable[[int], float]  # learning rate of round t = 1, 2, …
AUTO = "auto"  # chosen when the run is prepared, see training/learning_rate.py
PYTHON = "python"  # in a config: a function given in Python, which no import path names
WHERE = "algorithm.learning_rate"


def _validate(value: object) -> float | str | RateFunction:
    if isinstance(value, Real) and not isinstance(value, bool):
        if not 0 < float(value) < math.inf:
            raise ValueError("must be a finite number above 0")
        return float(value)
    if callable(value) or (isinstance(value, str) and (":" in value or value in (AUTO, PYTHON))):
        return value
    raise ValueError("must be a number above 0, auto, or package.module:function, a function of the round")


def _serialise(value: float | str | RateFunction) -> float | str:
    return import_path(value) if callable(value) else value


def import_path(function: RateFunction) -> str:
    """`package.module:name` of a function; `PYTHON` if it cannot be imported under a name of its own."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    found = getattr(sys.modules.get(module), name, None)
    return f"{module}:{name}" if found is function and module != "__main__" else PYTHON


LearningRate = Annotated[
    float | str | RateFunction, PlainValidator(_validate), PlainSerializer(_serialise, return_type=float | str)
]


def learning_rates(rate: float | str | RateFunction, schedule: ScheduleSettings, rounds: int) -> tuple[float, ...]:
    """Learning rate of each of the rounds 1, …, `rounds`; PdslError unless all are finite and above 0."""
    if isinstance(rate, int | float):
        if schedule.warmup >= rounds:
            raise PdslError(
                f"algorithm.schedule.warmup={schedule.warmup} must be below rounds={rounds}; warm up for fewer rounds"
            )
        rates = tuple(rate * schedule_factor(schedule, t, rounds) for t in range(1, rounds + 1))
    else:
        if schedule != ScheduleSettings():
            raise PdslError(f"{WHERE} is a function of the round already; leave algorithm.schedule out")
        function = _import_function(rate) if isinstance(rate, str) else rate
        rates = tuple(_call(function, t) for t in range(1, rounds + 1))
    for t, value in enumerate(rates, 1):
        if not 0 < value < math.inf:
            raise PdslError(f"{WHERE}: the rate of round {t} is {value:g}; it must be a finite number above 0")
    return rates


def schedule_factor(s: ScheduleSettings, t: int, rounds: int) -> float:
    """Factor on the learning rate in round t = 1, …, `rounds`.

    Warm-up rises linearly to 1 in its last round. After it, with n = 0, 1, … of N rounds done: step is
    factor^⌊n/every⌋, and cosine is final + (1 − final)(1 + cos(πn/N))/2, which is above 0 in every round.
    """
    if t <= s.warmup:
        return t / s.warmup
    n, N = t - s.warmup - 1, rounds - s.warmup
    if s.kind == "step":
        return float(s.factor ** (n // s.every))
    if s.kind == "cosine":
        return s.final + (1 - s.final) * (1 + math.cos(math.pi * n / N)) / 2
    return 1.0


def _import_function(path: str) -> RateFunction:
    if path == AUTO:
        raise PdslError(f"{WHERE}=auto is resolved when a run is prepared; give a number here")
    if path == PYTHON:
        raise PdslError(
            "this run's learning rate was a function given in Python, which a config cannot name; use pdsl.train"
        )
    function = import_object(path, WHERE)
    if not callable(function):
        raise PdslError(f"{WHERE}={path} is a {type(function).__name__}; name a function of the round")
    return function


def _call(function: RateFunction, t: int) -> float:
    try:
        return float(function(t))
    except Exception as e:  # a user's function may raise anything
        raise PdslError(f"{WHERE}: the function fails in round {t}: {type(e).__name__}: {e}; return a number") from e
