"""Prepared experiments from the arguments of `pdsl.train`."""

from typing import Any

from pdsl.api import configure
from pdsl.training.experiment import Experiment, prepare


def experiment(model: Any = "auto", data: Any = "digits", rounds: int = 100, **settings: Any) -> Experiment:
    config, objects = configure(model, data, rounds=rounds, **settings)
    return prepare(config, **objects)
