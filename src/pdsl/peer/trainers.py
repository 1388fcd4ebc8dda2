"""Trainers of one organisation, one for each generation of its noise."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from pdsl.algorithms.rehearsal import ABSENCE_WEIGHT
from pdsl.peer.experiment import bind_key
from pdsl.peer.noise_log import Draw, Generation, LoggedNoise
from pdsl.peer.plan import TrainingPlan
from pdsl.training.experiment import Experiment
from pdsl.training.trainer import Trainer, build_trainer, mixing_limits
from pdsl.utils.workers import Workers

OnRelease = Callable[[int, int, dict[Draw, str]], None]  # generation, round, digests of noisy vectors


class Trainers:
    """Trainers by generation, built when they are needed: the experiment has the key of this process."""

    def __init__(self, e: Experiment, plan: TrainingPlan, me: int, number: int, on_release: OnRelease):
        self._e, self._plan, self._me, self._number, self._on_release = e, plan, me, number, on_release
        self._built: dict[int, Trainer] = {}

    def get(self, generation: Generation, workers: Workers) -> Trainer:
        number, key, log = generation
        if number not in self._built:
            e = self._e if number == self._number else bind_key(self._e, self._plan, self._me, key, number)
            on_release = partial(self._on_release, number)
            noise = LoggedNoise(e.sigma, e.streams, workers, log, on_release, sigma_scale=e.sigma_scale)
            trainer = build_trainer(e, workers)
            if trainer.limits:
                trainer = replace(trainer, absence_limits=mixing_limits(e, trainer.noise, ABSENCE_WEIGHT))
            self._built[number] = replace(trainer, noise=noise)
        return self._built[number]
