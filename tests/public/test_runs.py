"""Whole runs with feature maps and starts: saving, predicting, resuming, refusals."""

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import pdsl
from pdsl.data import load
from pdsl.public.knowledge import learn_features
from pdsl.runs.listeners import RunListener
from pdsl.settings import DataSettings, PublicSettings
from pdsl.utils.inputs import AugmentedFields
from pdsl.utils.random import Streams
from pdsl.utils.workers import Workers
from tests.helpers.commands import result_of
from tests.helpers.experiments import experiment
from tests.helpers.refusals import refused
from tests.public import maps

Values = dict[str, Any]
PATCHES: Values = {
    "features": "patches",
    "patch": 3,
    "pool": 2,
    "filters": 40,
    "components": 50,
    "start": "labels",
}
QUICK: Values = {"rounds": 2, "graph": {"kind": "ring", "agents": 3}, "validation": 60, "baselines": "none"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[pdsl.Result, Path]:
    path = tmp_path_factory.mktemp("runs") / "run"
    return pdsl.train("auto", "digits", public=PATCHES, rounds=3, out=path), path


def raw_test_set(result: pdsl.Result) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Pixels 0 to 16 and labels of the run's test set."""
    e = result.experiment
    scaling = e.data.scaling
    assert scaling is not None and e.public.raw is not None
    found = load_digits()
    raw = {np.float32(image).tobytes(): image for image in found.images}
    test = load(DataSettings(name="digits"), Streams(0))
    whole = (test.test_x * scaling.deviation + scaling.mean) * scaling.white
    features = e.public.features
    assert features is not None
    with Workers(1) as workers:
        of_all = features(test.test_x, workers)
    place = {row.numpy().tobytes(): i for i, row in enumerate(of_all)}
    at = [place[row.numpy().tobytes()] for row in e.test[0]]  # type: ignore[union-attr]
    images = whole.round()[at, 0].numpy()
    assert all(np.float32(image).tobytes() in raw for image in images)
    return images, e.test[1].numpy()


def test_a_loaded_run_predicts_raw_pixels_with_the_accuracy_of_the_run(run: tuple[pdsl.Result, Path]) -> None:
    result, path = run
    images, labels = raw_test_set(result)
    loaded = pdsl.load(path)
    for predicted in (loaded.predict(images), result.predict(images)):
        assert float(np.mean(predicted == labels)) == pytest.approx(result.accuracy_of_mean, abs=1e-12)
    assert np.allclose(loaded.predict_proba(images), result.predict_proba(images), atol=1e-6)
    assert result.accuracy_of_mean > 0.9


def test_the_models_of_a_result_accept_scaled_images(run: tuple[pdsl.Result, Path]) -> None:
    result, path = run
    e = result.experiment
    images, labels = raw_test_set(result)
    assert e.data.scaling is not None
    scaled = e.data.scaling.apply(torch.from_numpy(images)[:, None])
    with torch.no_grad():
        outputs = [model(scaled) for model in (result.model, pdsl.load(path).model)]
    assert torch.equal(*outputs)
    assert float((outputs[0].argmax(1).numpy() == labels).mean()) == pytest.approx(result.accuracy_of_mean, abs=0.004)
    own = [float((m(scaled).argmax(1).numpy() == labels).mean()) for m in pdsl.load(path).models]
    assert float(np.mean(own)) == pytest.approx(result.accuracy, abs=0.004)


def test_the_privacy_statement_names_the_uses_of_the_public_set(run: tuple[pdsl.Result, Path]) -> None:
    result, _ = run
    assert "the public set, which is not protected, for features, start;" in result.summary["privacy"]
    plain = pdsl.train("auto", "digits", **QUICK)
    assert "public set" not in plain.summary["privacy"]
    only = pdsl.train("auto", "digits", public={"start": "labels"}, **QUICK)
    assert "for start;" in only.summary["privacy"]


def test_a_run_without_its_feature_file_is_refused(run: tuple[pdsl.Result, Path], tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run[1], copied)
    (copied / "features.safetensors").unlink()
    with refused("features.safetensors", "missing or damaged"):
        pdsl.load(copied).predict(np.zeros((2, 8, 8)))


def test_a_loaded_run_does_not_need_the_cache(
    run: tuple[pdsl.Result, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSL_CACHE", str(tmp_path / "none"))
    images, _ = raw_test_set(run[0])
    assert np.array_equal(pdsl.load(run[1]).predict(images), run[0].predict(images))
    assert not (tmp_path / "none").exists()


def test_gradients_see_records_of_norm_one(run: tuple[pdsl.Result, Path]) -> None:
    e = run[0].experiment
    assert e.data.x.shape[1:] == (50,)  # type: ignore[union-attr]
    assert torch.allclose(e.data.x.norm(dim=1), torch.ones(len(e.data.y)), atol=1e-5)  # type: ignore[union-attr]
    assert e.network.num_parameters == 500


@pytest.mark.slow
def test_scattering_on_digits_learns_and_predicts(tmp_path: Path) -> None:
    public = {"features": "scattering", "pool": 2, "components": 60, "start": "labels"}
    result = pdsl.train("auto", "digits", public=public, out=tmp_path / "run", **QUICK)
    images, labels = raw_test_set(result)
    predicted = pdsl.load(tmp_path / "run").predict(images)
    assert float(np.mean(predicted == labels)) == pytest.approx(result.accuracy_of_mean, abs=1e-12)
    assert result.accuracy_of_mean > 0.7


@pytest.mark.slow
def test_a_network_as_head_of_the_features_learns_more_than_the_public_set_alone(tmp_path: Path) -> None:
    result = pdsl.train("mlp", "digits", public=PATCHES, rounds=30, baselines="public", out=tmp_path / "run")
    assert result.experiment.network.num_parameters == 50 * 64 + 64 + 64 * 10 + 10
    images, labels = raw_test_set(result)
    predicted = pdsl.load(tmp_path / "run").predict(images)
    assert float(np.mean(predicted == labels)) == pytest.approx(result.accuracy_of_mean, abs=1e-12)
    assert result.accuracy_of_mean > (result.baselines or {})["public"]


class StopAfter(RunListener):
    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_round(self, row: Any) -> None:
        if row["round"] == self.rounds:
            raise KeyboardInterrupt


def interrupted(path: Path, model: Any, **values: Any) -> pdsl.Result:
    """A run that is killed after its first round and started again by the same call."""
    with pytest.raises(KeyboardInterrupt):
        pdsl.train(model, "digits", out=path, callbacks=[StopAfter(1)], **values)
    return pdsl.train(model, "digits", out=path, **values)


@pytest.mark.slow
@pytest.mark.parametrize("public", [PATCHES, {"start": "labels"}], ids=["features", "start"])
def test_an_interrupted_run_ends_with_the_same_bits(tmp_path: Path, public: Values) -> None:
    values = {**QUICK, "rounds": 3, "public": public}
    pdsl.train("auto", "digits", out=tmp_path / "whole", **values)
    interrupted(tmp_path / "parts", "auto", **values)
    assert result_of(tmp_path / "parts") == result_of(tmp_path / "whole")


def frozen_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 30), nn.Tanh(), nn.Linear(30, 10))
    model[1].requires_grad_(False)
    return model


FROZEN: Values = {"features": "model", "components": 20}


@pytest.mark.parametrize("components", [0, 20])
def test_a_frozen_prefix_is_the_feature_map_and_only_the_head_is_trained(tmp_path: Path, components: int) -> None:
    width = components or 30
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 30), nn.Tanh(), nn.Linear(width, 10))
    model[1].requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    public = {"features": "model", "components": components}
    result = pdsl.train(model, "digits", public=public, out=tmp_path / "run", **QUICK)
    assert result.experiment.network.num_parameters == width * 10 + 10
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    images, labels = raw_test_set(result)
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    loaded = pdsl.load(tmp_path / "run", model=other)  # all weights come from the files
    assert np.array_equal(loaded.predict(images), result.predict(images))
    assert float(np.mean(loaded.predict(images) == labels)) == pytest.approx(result.accuracy_of_mean, abs=1e-12)
    if components == 0:  # by hand: frozen layers, norm 1, head
        e = result.experiment
        assert e.data.scaling is not None
        scaled = e.data.scaling.apply(torch.from_numpy(images)[:, None])
        hidden = nn.functional.normalize(torch.tanh(model[1](scaled.flatten(1))))
        assert torch.allclose(result.model(scaled), e.network.to_module(result.evaluation.mean)(hidden), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("public", [{"features": "model", "components": 30}, {"start": "labels"}], ids=str)
@pytest.mark.parametrize("mode", ["none", "total"])
def test_an_interrupted_run_of_an_own_model_restores_the_weights_it_started_with(
    tmp_path: Path, public: Values, mode: str
) -> None:
    """A script builds a new model with other random weights when it is started again."""
    values = {**QUICK, "public": public, "privacy": {"mode": mode}}
    whole = pdsl.train(frozen_model(), "digits", out=tmp_path / "whole", **values)
    with pytest.raises(KeyboardInterrupt):
        pdsl.train(frozen_model(), "digits", out=tmp_path / "parts", callbacks=[StopAfter(1)], **values)
    parts = pdsl.train(frozen_model(seed=1), "digits", out=tmp_path / "parts", **values)
    assert parts.summary["models_sha256"] == whole.summary["models_sha256"]


@pytest.mark.parametrize(
    "model",
    [None, nn.Linear(64, 10), nn.Sequential(nn.Flatten(), nn.Linear(64, 10))],
    ids=["built in", "no sequence", "nothing frozen"],
)
def test_features_of_a_model_without_frozen_layers_are_refused(model: nn.Module | None) -> None:
    with refused("public.features=model", "torch.nn.Sequential", "frozen"):
        experiment(model or "auto", public=FROZEN, **QUICK)


@pytest.mark.parametrize("name", ["random_features", "module"])
def test_a_map_named_by_its_import_path_works_and_loads(tmp_path: Path, name: str) -> None:
    public = {"features": f"tests.public.maps:{name}", "components": 0}
    result = pdsl.train("auto", "digits", public=public, out=tmp_path / "run", **QUICK)
    e = result.experiment
    images, labels = raw_test_set(result)
    assert e.data.scaling is not None
    scaled = e.data.scaling.apply(torch.from_numpy(images)[:, None])
    expected = nn.functional.normalize(getattr(maps, name)(scaled))
    assert torch.allclose(e.test[0], expected, atol=1e-5)  # type: ignore[arg-type]
    assert np.array_equal(pdsl.load(tmp_path / "run").predict(images), result.predict(images))
    assert float(np.mean(result.predict(images) == labels)) == pytest.approx(result.accuracy_of_mean, abs=1e-12)


def test_a_changed_map_of_the_same_name_is_not_found_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    public = {"features": "tests.public.maps:random_features", "components": 10}
    first = experiment(public=public, **QUICK)
    monkeypatch.setattr(maps, "WEIGHTS", -maps.WEIGHTS.flip(0))
    second = experiment(public=public, **QUICK)
    assert first.public.features is not None and second.public.features is not None
    assert first.public.features.digest != second.public.features.digest
    assert not torch.equal(first.data.x, second.data.x)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tests.public.maps:centred", "depend on the other records"),
        ("tests.public.maps:relative", "depend on the other records"),
        ("tests.public.maps:cumulated", "depend on the other records"),
        ("tests.public.maps:placed", "depend on its place"),
        ("tests.public.maps:undefined", "infinite or undefined"),
        ("tests.public.maps:pieces", "returns 128 rows for 32 records"),
        ("tests.public.maps:broken", "no such key"),
        ("tests.public.maps:noisy", "or are random"),
        ("tests.public.maps:number", "not callable"),
        ("tests.public.maps:missing", "missing"),
        ("no.such.module:map", "no"),
        ("patch", "choose none, patches, scattering, model"),
        ("tests.public.maps:one_hot", "does not accept records of shape (1, 8, 8)"),
    ],
)
def test_maps_that_cannot_be_used_are_refused_in_one_line(name: str, words: str) -> None:
    with refused("public.features", words):
        experiment(public={"features": name}, **QUICK)


def test_maps_of_images_refuse_integers_in_one_line() -> None:
    x, y = torch.randint(0, 200, (300, 1, 8, 8)), torch.arange(300) % 3
    with refused("public.features=patches takes floats, not torch.int64"):
        experiment(nn.Flatten(), (x, y), graph="ring", public={"features": "patches", "patch": 3}, rounds=1)


def test_the_frozen_layers_of_a_users_model_are_not_shared_with_the_result() -> None:
    model = frozen_model()
    model.train()
    result = pdsl.train(model, "digits", public={"features": "model", "components": 0}, **QUICK)
    assert all(layer.training for layer in model.modules())
    images = torch.randn(5, 1, 8, 8)
    before = result.model(images)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(result.model(images), before)


def test_scattering_of_mirror_images_has_a_digest_of_its_own() -> None:
    public = {"features": "scattering", "pool": 1, "components": 0}
    digests = set()
    for mirror in (False, True):
        features = experiment(public={**public, "mirror": mirror}, **QUICK).public.features
        assert features is not None
        digests.add(features.digest)
    assert len(digests) == 2


@pytest.mark.parametrize("features", ["patches", "scattering"])
def test_maps_of_images_refuse_tables_in_one_line(features: str) -> None:
    x, y = torch.randn(300, 5), torch.arange(300) % 3
    with refused(f"public.features={features}", "images of shape", "(5,)"):
        experiment("auto", (x, y), graph="ring", public={"features": features}, rounds=1)


def test_a_start_with_too_few_public_records_is_refused() -> None:
    with refused("public.start=labels", "at least 4"):
        experiment(public={"start": "labels"}, **{**QUICK, "validation": 3})


def test_a_map_of_integers_predicts_raw_integers(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 12, (400, 6), generator=generator)
    y = (tokens < 4).sum(1).clamp(max=2)
    public = {"features": "tests.public.maps:one_hot", "components": 0}
    result = pdsl.train("auto", (tokens, y), graph="ring", public=public, rounds=2, out=tmp_path / "run")
    assert np.array_equal(pdsl.load(tmp_path / "run").predict(tokens), result.predict(tokens))


def test_a_map_of_several_inputs_predicts_and_loads(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(400, 3, generator=generator) for _ in range(2))
    y = ((a * b).sum(1) > 0).long()
    public = {"features": "tests.public.maps:both", "components": 0}
    data = ({"a": a, "b": b}, y)
    result = pdsl.train("auto", data, graph="ring", public=public, rounds=2, out=tmp_path / "run")
    inputs = {"a": a, "b": b}
    assert np.array_equal(pdsl.load(tmp_path / "run").predict(inputs), result.predict(inputs))


def test_a_map_of_a_table_keeps_the_names_of_its_columns(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame(rng.normal(size=(400, 3)), columns=["a", "b", "c"])
    frame["y"] = (frame["a"] > frame["b"]).astype(int)
    public = {"features": "tests.public.maps:squares", "components": 0}
    result = pdsl.train("auto", frame, target="y", graph="ring", public=public, rounds=2, out=tmp_path / "run")
    mixed = frame[["y", "c", "a", "b"]]
    for predictor in (result, pdsl.load(tmp_path / "run")):
        assert np.array_equal(predictor.predict(mixed), predictor.predict(frame))
        assert "normalisation" in result.summary["privacy"]


def test_random_transforms_and_features_are_refused_together() -> None:
    none = torch.zeros(3, dtype=torch.int64)
    public = AugmentedFields(torch.zeros(3, 1, 8, 8), [], none, none)
    with refused("public.features", "random transforms"):
        learn_features(PublicSettings(features="patches"), public)
