"""Planted faults: private records in results of the public set."""

import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor

from pdsl.public.features import BUILT_IN
from pdsl.public.knowledge import hold_out
from pdsl.public.projection import Projection
from tests.faults.base import BARE, PUBLIC_PARTS, RECORDS_APART, Values, datasets, experiment, fault, substitute

LEARNED: Values = {
    "model": {"name": "linear"},
    "public": {"features": "patches", "patch": 3, "pool": 2, "filters": 10, "components": 12, "start": "labels"},
}
SCATTERED: Values = {"model": {"name": "linear"}, "public": {"features": "scattering", "pool": 1, "components": 12}}


def fit_with(monkeypatch: pytest.MonkeyPatch, records: int) -> None:
    """The feature map is fitted to the public set and some private records; all else is honest."""
    honest_use, honest_learn, private = experiment.use_features, experiment.learn_features, []

    def use(config: Any, data: Any, q: Any, test: Any, model: Any) -> Any:
        private[:] = [data.x[:records]]
        return honest_use(config, data, q, test, model)

    def learn(settings: Any, public: Tensor, *of: Any) -> Any:
        return honest_learn(settings, torch.cat([public, private[0]]), *of)

    monkeypatch.setenv("PDSL_CACHE", tempfile.mkdtemp())  # faulty results must not be found by honest runs
    substitute(monkeypatch, experiment, "use_features", use)
    substitute(monkeypatch, experiment, "learn_features", learn)


@fault(BARE, PUBLIC_PARTS, **{**LEARNED, "public": {**LEARNED["public"], "start": "none"}})
def private_record_in_the_feature_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One private record is among the images that filters and components are fitted to."""
    fit_with(monkeypatch, 1)


@fault(BARE, PUBLIC_PARTS, **{**LEARNED, "public": {**LEARNED["public"], "start": "none"}})
def feature_map_of_all_private_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """The feature map is fitted to all records, private ones too."""
    fit_with(monkeypatch, 10_000)


def start_with(monkeypatch: pytest.MonkeyPatch, records: int) -> None:
    """The start is trained on the public set and some private records."""
    honest_use, honest_start, private = experiment.use_features, experiment.use_start, []

    def use(*of: Any) -> Any:
        found = honest_use(*of)
        private[:] = [(found[2].x[:records], found[2].y[:records])]
        return found

    def start(config: Any, network: Any, public: Any, knowledge: Any) -> Any:
        ((x, y),) = private
        more = torch.cat([public[0], x]), torch.cat([public[1], y])
        if knowledge.features is not None:
            variants = more[0], torch.arange(len(more[1]))
            object.__setattr__(knowledge.features, "variants", variants)
        network, knowledge, _ = honest_start(config, network, more, knowledge)
        return network, knowledge, public

    monkeypatch.setenv("PDSL_CACHE", tempfile.mkdtemp())  # faulty results must not be found by honest runs
    substitute(monkeypatch, experiment, "use_features", use)
    substitute(monkeypatch, experiment, "use_start", start)


@fault(BARE, PUBLIC_PARTS, **LEARNED)
def private_records_in_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start is trained on features of private records too."""
    start_with(monkeypatch, 200)


@fault(BARE, PUBLIC_PARTS, model={"name": "softmax"}, public={"start": "labels"})
def private_pixels_in_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start is trained on private images too."""
    start_with(monkeypatch, 20)


def project_with(monkeypatch: pytest.MonkeyPatch, records: int) -> None:
    """Principal components are those of the features of the public set and of some private records."""
    honest_use, honest_learn, honest_fit, kept = (
        experiment.use_features,
        experiment.learn_features,
        Projection.fit,
        {},
    )

    def use(config: Any, data: Any, *of: Any) -> Any:
        kept["x"] = data.x[:records]
        return honest_use(config, data, *of)

    def learn(settings: Any, public: Tensor, *of: Any) -> Any:
        kept["settings"], kept["shape"] = settings, public.shape[1:]
        return honest_learn(settings, public, *of)

    def fit(self: Projection, features: Tensor, whitening: float) -> None:
        extractor = BUILT_IN[kept["settings"].features](kept["shape"], kept["settings"])
        honest_fit(self, torch.cat([features, extractor(kept["x"])]), whitening)

    monkeypatch.setenv("PDSL_CACHE", tempfile.mkdtemp())  # faulty results must not be found by honest runs
    substitute(monkeypatch, experiment, "use_features", use)
    substitute(monkeypatch, experiment, "learn_features", learn)
    monkeypatch.setattr(Projection, "fit", fit)


@fault(BARE, PUBLIC_PARTS, **SCATTERED)
def private_records_in_the_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Principal components are those of private records too."""
    project_with(monkeypatch, 100)


def publish_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the public set are agents' records."""
    honest = experiment.split_public

    def split(data: Any, *of: Any) -> Any:
        (x, y), test = honest(data, *of)
        count = 9 * len(y) // 10
        trained = torch.nonzero(hold_out(len(y), 0.1))[:count, 0]
        x, y = x.clone(), y.clone()
        x[trained], y[trained] = data.x[: len(trained)], data.y[: len(trained)]
        return (x, y), test

    monkeypatch.setenv("PDSL_CACHE", tempfile.mkdtemp())  # faulty results must not be found by honest runs
    substitute(monkeypatch, experiment, "split_public", split)


@fault(BARE, RECORDS_APART, model={"name": "softmax"}, public={"start": "labels"})
def agents_records_in_the_part_of_the_public_set_that_is_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start is trained on agents' records; the records that value messages are public."""
    publish_records(monkeypatch)


@fault(BARE, PUBLIC_PARTS, model={"name": "softmax"}, data={"scale": "public"})
def normalisation_of_private_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are standardised by mean and deviation of all records, private ones too."""
    honest, honest_measure, private = experiment.standardise, datasets.measure_scaling, []

    def standardise(data: Any, *of: Any) -> Any:
        private[:] = [data.x]
        return honest(data, *of)

    substitute(monkeypatch, experiment, "standardise", standardise)
    substitute(monkeypatch, datasets, "measure_scaling", lambda x: honest_measure(torch.cat([x, *private])))
