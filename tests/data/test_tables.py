"""Tables: data frames, CSV and Parquet files, against pandas and scikit-learn."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.preprocessing import StandardScaler

from pdsl.config import commented_toml, validate
from pdsl.config import load as load_config
from pdsl.data import Data, Scaling, from_python, load, standardise
from pdsl.runs.runner import run
from pdsl.settings import DataSettings
from pdsl.training.experiment import Experiment, prepare
from pdsl.utils.random import Streams
from tests.helpers.refusals import refused

N = 60
FRAME = pd.DataFrame(
    {
        "age": np.arange(N) + 20,
        "dose": np.linspace(-3, 5, N),
        "smoker": np.arange(N) % 3 == 0,
        "blood": pd.Categorical(["A", "B", "0"] * 20, categories=["0", "A", "AB", "B"]),
        "hospital": ["bonn", "aachen", "celle"] * 20,
        "diagnosis": ["well", "ill"] * 30,
    }
)
OPTIONS: dict[str, Any] = {"target": "diagnosis", "owner": "hospital"}
FEATURES = ("age", "dose", "smoker", "blood=0", "blood=A", "blood=AB", "blood=B")


def encoded(frame: pd.DataFrame) -> np.ndarray:
    inputs = frame.drop(columns=["hospital", "diagnosis"])
    return pd.get_dummies(inputs, columns=["blood"], prefix_sep="=").astype(np.float32).to_numpy()


def test_columns_become_features_and_names_are_kept() -> None:
    data = from_python((FRAME, FRAME), Streams(0), **OPTIONS)
    assert data.features == FEATURES
    assert np.array_equal(data.x.numpy(), encoded(FRAME))
    assert data.agent_names == ("aachen", "bonn", "celle")
    assert data.class_names == ("ill", "well")
    assert data.owner is not None
    assert [data.agent_names[i] for i in data.owner] == FRAME["hospital"].tolist()
    assert [data.class_names[i] for i in data.y] == FRAME["diagnosis"].tolist()


def test_the_test_table_may_have_other_columns_in_another_order() -> None:
    test = FRAME[::-1][["diagnosis", "blood", "smoker", "dose", "age"]].assign(remark="none")
    data = from_python((FRAME, test), Streams(0), **OPTIONS)
    assert np.array_equal(data.test_x.numpy(), encoded(FRAME)[::-1])
    with refused("test data", "no column age"):
        from_python((FRAME, test.drop(columns="age")), Streams(0), **OPTIONS)


def test_frames_of_several_agents_and_pairs_of_frame_and_series() -> None:
    parts = {name: part.drop(columns="hospital") for name, part in FRAME.groupby("hospital")}
    data = from_python((parts, FRAME), Streams(0), target="diagnosis")
    assert data.agent_names == ("aachen", "bonn", "celle")
    pair = from_python((FRAME[["age", "dose"]], FRAME["diagnosis"]), Streams(0))
    assert pair.features == ("age", "dose")
    assert pair.class_names == ("ill", "well")
    several = from_python((FRAME[["age"]], FRAME[["dose", "dose"]].set_axis(["a", "b"], axis=1)), Streams(0))
    assert several.y.shape[1] == 2


def test_several_targets() -> None:
    data = from_python((FRAME, FRAME), Streams(0), target=["age", "dose"], columns=["smoker"], task="regression")
    np.testing.assert_allclose(data.y.numpy(), FRAME[["age", "dose"]].to_numpy(), rtol=1e-6)
    labels = FRAME.assign(thin=FRAME["age"] > 50)
    data = from_python((labels, labels), Streams(0), target=["smoker", "thin"], columns=["age"])
    assert data.class_names == ("smoker", "thin")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_files_hold_the_same_records(kind: str, tmp_path: Path) -> None:
    paths = {name: tmp_path / f"{name}.{kind}" for name in ("all", "test")}
    for path in paths.values():
        FRAME.to_parquet(path) if kind == "parquet" else FRAME.to_csv(path, index=False)
    more: Any = {"categories": {"blood": ["0", "A", "AB", "B"]}} if kind == "csv" else {}
    settings = DataSettings(
        name=kind,
        path=str(paths["all"]),
        test_path=str(paths["test"]),
        **OPTIONS,
        **more,  # type: ignore[arg-type]
    )
    data = load(settings, Streams(0))
    assert data.name == "all"
    assert data.features == FEATURES
    np.testing.assert_allclose(data.x.numpy(), encoded(FRAME), rtol=1e-6)
    np.testing.assert_allclose(data.test_x.numpy(), encoded(FRAME), rtol=1e-6)
    assert data.agent_names == ("aachen", "bonn", "celle")


def test_a_folder_has_one_table_per_agent(tmp_path: Path) -> None:
    for name, part in FRAME.groupby("hospital"):
        part[["age", "dose", "diagnosis"]].to_csv(tmp_path / f"{name}.csv", index=False)
    FRAME[["dose", "age", "diagnosis"]].to_csv(tmp_path / "test.csv", index=False)
    data = load(DataSettings(name="csv", path=str(tmp_path), target="diagnosis"), Streams(0))
    assert data.agent_names == ("aachen", "bonn", "celle")
    np.testing.assert_allclose(data.test_x.numpy(), encoded(FRAME)[:, :2], rtol=1e-6)


@pytest.mark.parametrize(
    ("frame", "options", "parts"),
    [
        (FRAME, {}, ["target='...'", "age, dose"]),
        (FRAME, {"target": "cure"}, ["no column cure"]),
        (FRAME, {"target": "diagnosis"}, ["column hospital", ".astype('category')", "data.categories.hospital"]),
        (FRAME, {**OPTIONS, "columns": ["age", "diagnosis"]}, ["diagnosis is an input and a target"]),
        (FRAME, {**OPTIONS, "owner": "clinic"}, ["no column clinic"]),
        (FRAME.assign(age=[np.nan] * 7 + [1] * 53), OPTIONS, ["column age has 7 missing values"]),
        (FRAME.assign(age=[np.inf] * 2 + [1] * 58), OPTIONS, ["column age has 2 infinite values"]),
        (FRAME.assign(hospital=[None] + ["a", "b"] * 29 + ["a"]), OPTIONS, ["column hospital has 1 missing"]),
        (FRAME.assign(day=pd.Timestamp("2020-01-01")), OPTIONS, ["column day is datetime64"]),
        (FRAME[:0], OPTIONS, ["no rows"]),
        (FRAME.drop(columns=["age", "dose", "smoker", "blood"]), OPTIONS, ["no input columns"]),
        (FRAME, {**OPTIONS, "categories": {"blood": ["A", "B"]}}, ["column blood has the value 0"]),
        (pd.concat([FRAME, FRAME[["age"]]], axis=1), OPTIONS, ["several columns age"]),
    ],
)
def test_wrong_tables_are_refused(frame: pd.DataFrame, options: dict[str, Any], parts: list[str]) -> None:
    with refused("data", *parts):
        from_python(frame, Streams(0), **options)


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    FRAME.to_csv(path)
    with refused("mine.csv", "saved index", "index=False"):
        load(DataSettings(name="csv", path=str(path), **OPTIONS), Streams(0))
    path.write_bytes(b"")
    with refused("mine.csv", "cannot be read"):
        load(DataSettings(name="csv", path=str(path), **OPTIONS), Streams(0))
    with refused("data.path", "no"):
        load(DataSettings(name="parquet", path="nowhere.parquet", target="y"), Streams(0))
    with refused("there is no", "test.csv"):
        FRAME.to_csv(path, index=False)
        options: Any = {**OPTIONS, "columns": ("age",)}
        load(DataSettings(name="csv", path=str(path), test_path=str(tmp_path / "test.csv"), **options), Streams(0))


def test_inputs_are_standardised_by_the_public_set() -> None:
    data = from_python((FRAME, FRAME[:30]), Streams(0), **OPTIONS)
    e = experiment(data)
    raw = data.validation or (data.test_x, data.test_y)
    assert e.data.scaling is not None
    public = e.data.scaling.deviation * e.validation[0] + e.data.scaling.mean  # raw records of Q
    scaler = StandardScaler().fit(public.double().numpy())
    for column in (0, 1):  # numbers
        np.testing.assert_allclose(e.data.scaling.mean[column], scaler.mean_[column], rtol=1e-5)
        np.testing.assert_allclose(e.data.scaling.deviation[column], scaler.scale_[column], rtol=1e-5)
    assert e.data.scaling.mean[2:].tolist() == [0] * 5  # indicators
    assert e.data.scaling.deviation[2:].tolist() == [1] * 5
    assert torch.equal(e.data.scaling.apply(data.x), e.data.x)
    assert len(public) == len(raw[0]) // 2
    unscaled = experiment(data, {"scale": "none"})
    assert unscaled.data.scaling is None
    assert torch.equal(unscaled.data.x, data.x)


def test_scaling_twice_changes_nothing_and_bytes_are_scaled_from_raw() -> None:
    settings = DataSettings(scale="public", pixels=True)
    images = np.arange(N * 12, dtype=np.uint8).reshape(N, 3, 2, 2)
    y = np.arange(N) % 2
    data = from_python(((images, y), (images, y)), Streams(0), pixels=True)
    q = test = (data.test_x, data.test_y)
    scaled, _, _ = standardise(data, q, test, settings)
    assert scaled.scaling is not None
    assert torch.allclose(scaled.x.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(scaled.x.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5)
    assert torch.allclose(scaled.scaling.apply(torch.tensor(images)), scaled.x, atol=1e-5)
    again, _, _ = standardise(scaled, q, test, settings)
    assert again is scaled
    stored = Scaling.from_dict(json.loads(json.dumps(scaled.scaling.as_dict())))
    assert torch.equal(stored.apply(torch.tensor(images)), scaled.scaling.apply(torch.tensor(images)))


def test_constants_of_built_in_data_sets_are_known() -> None:
    from sklearn.datasets import load_digits

    data = load(DataSettings(), Streams(0))
    raw = torch.tensor(load_digits().images)[:, None]
    assert data.scaling is not None
    rows = {row.numpy().tobytes() for row in data.scaling.apply(raw)}
    assert all(row.numpy().tobytes() in rows for row in data.x)
    q = (data.test_x, data.test_y)
    assert standardise(data, q, q, DataSettings())[0] is data
    public, (scaled, _), _ = standardise(data, q, q, DataSettings(scale="public"))
    assert public.standardised
    assert public.scaling is not None
    torch.testing.assert_close(scaled.mean((0, 2, 3)), torch.zeros(1), atol=1e-5, rtol=0)
    records = torch.cat([public.x, scaled]).flatten(1)
    nearest = torch.cdist(records, public.scaling.apply(raw).float().flatten(1)).amin(1)
    torch.testing.assert_close(nearest, torch.zeros_like(nearest), atol=1e-2, rtol=0)


@pytest.mark.parametrize("as_frame", [False, True])
def test_bunches_of_scikit_learn(as_frame: bool) -> None:
    bunch = load_breast_cancer(as_frame=as_frame)
    data = from_python((bunch, bunch), Streams(0))
    assert data.class_names == ("malignant", "benign")
    assert data.features[0] == "mean radius"
    np.testing.assert_allclose(data.x.numpy(), np.asarray(bunch.data), rtol=1e-6)
    assert from_python(load_diabetes(as_frame=as_frame), Streams(0)).classes == 0


def experiment(data: Data, options: dict[str, Any] | None = None, **settings: Any) -> Experiment:
    return prepare(validate({"data": {"name": "python", **(options or {})}, **settings}, "settings"), data=data)


def test_owners_are_the_agents_unless_another_number_is_asked_for() -> None:
    data = from_python((FRAME, FRAME), Streams(0), **OPTIONS)
    e = experiment(data)
    assert e.graph.agents == e.config.graph.agents == 3
    assert e.metadata()["names"] == ["aachen", "bonn", "celle"]
    assert e.metadata()["classes"] == ["ill", "well"]
    with refused("graph.agents: 4", "3 agents"):
        experiment(data, graph={"agents": 4})


def test_settings_of_a_table_survive_toml(tmp_path: Path) -> None:
    FRAME.to_csv(tmp_path / "all.csv", index=False)
    text = "[data]\nname = 'csv'\npath = 'all.csv'\ntarget = 'diagnosis'\nclasses = ['ill', 'well']\n"
    (tmp_path / "a.toml").write_text(text + "categories = { blood = ['0', 'A', 'AB', 'B'] }\n", encoding="utf-8")
    config = load_config(tmp_path / "a.toml", ["data.owner=hospital"])
    (tmp_path / "b.toml").write_text(commented_toml(config), encoding="utf-8")
    assert load_config(tmp_path / "b.toml") == config
    assert config.data.categories == {"blood": ("0", "A", "AB", "B")}


def test_a_run_whose_agents_came_from_the_data_is_resumed(tmp_path: Path) -> None:
    FRAME[["age", "dose", "hospital", "diagnosis"]].to_csv(tmp_path / "all.csv", index=False)
    values = {"data": {"name": "csv", "path": str(tmp_path / "all.csv"), **OPTIONS}, "rounds": 2}
    first = run(validate(values, "settings"), tmp_path / "run")
    again = run(validate(values, "settings"), tmp_path / "run")
    assert first is not None
    assert again is not None
    assert first["agents"] == again["agents"] == 3
    assert again["models_sha256"] == first["models_sha256"]
