"""Predictions for raw inputs in every form that training accepts: the oracle is the model on hand-encoded numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import pdsl
from tests.helpers.refusals import refused

QUICK: dict[str, Any] = {"rounds": 3, "engine": {"workers": 2}, "privacy": {"mode": "none"}}


def patients(n: int = 240) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    sex, stage = rng.choice(["f", "m"], n), rng.choice(["i", "ii", "iii"], n)
    age, dose = rng.normal(60, 10, n), rng.integers(1, 9, n)
    risk = (age - 60) / 10 + 2 * (sex == "m") + (stage == "iii") - 0.3 * dose
    table = pd.DataFrame({"age": age, "sex": sex, "dose": dose, "stage": stage, "smoker": rng.random(n) < 0.3})
    table["outcome"] = np.where(risk > risk.mean(), "dead", "alive")
    return table.assign(clinic=np.array(["a", "b", "c"])[np.arange(n) % 3])


CATEGORIES = {"sex": ["f", "m"], "stage": ["i", "ii", "iii"]}


def encode(table: pd.DataFrame) -> Tensor:
    """Numbers in the order of the columns, by hand."""
    columns = [
        table["age"],
        *(table["sex"] == value for value in "fm"),
        table["dose"],
        *(table["stage"] == value for value in ("i", "ii", "iii")),
        table["smoker"],
    ]
    return torch.tensor(np.stack([column.to_numpy().astype(np.float32) for column in columns], axis=1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("predict")


@pytest.fixture(scope="module")
def trained(folder: Path) -> pdsl.Result:
    """A run on a table with text, in a CSV file."""
    patients().to_csv(folder / "patients.csv", index=False)
    options = {"target": "outcome", "owner": "clinic", "categories": CATEGORIES}
    return pdsl.train("mlp", str(folder / "patients.csv"), out=folder / "run", **options, **QUICK)


@pytest.fixture(params=["result", "loaded"])
def run(request: pytest.FixtureRequest, trained: pdsl.Result, folder: Path) -> Any:
    return trained if request.param == "result" else pdsl.load(folder / "run")


def expected(trained: pdsl.Result, table: pd.DataFrame) -> Any:
    scaling = trained.experiment.data.scaling
    assert scaling is not None
    return np.array(["alive", "dead"])[trained.model(scaling.apply(encode(table))).argmax(1)]


FORMS: dict[str, Callable[[pd.DataFrame], object]] = {
    "raw frame": lambda table: table,
    "inputs only": lambda table: table.drop(columns=["outcome", "clinic"]),
    "other order": lambda table: table[table.columns[::-1]],
    "categories of another order": lambda table: table.assign(stage=pd.Categorical(table["stage"], ["iii", "ii", "i"])),
    "encoded numbers": encode,
    "mapping": lambda table: table.to_dict("list"),
}


@pytest.mark.parametrize("form", FORMS)
def test_columns_are_chosen_by_name(form: str, run: Any, trained: pdsl.Result) -> None:
    table = patients()
    assert set(wanted := expected(trained, table)) == {"alive", "dead"}
    assert run.predict(FORMS[form](table)).tolist() == wanted.tolist()


def test_rows_files_and_hugging_face_data(run: Any, trained: pdsl.Result, folder: Path) -> None:
    table = patients()
    wanted = expected(trained, table).tolist()
    assert [run.predict(table.iloc[i])[0] for i in range(8)] == wanted[:8]
    assert run.predict(table.iloc[3].to_dict()).tolist() == wanted[3:4]
    assert run.predict(folder / "patients.csv").tolist() == run.predict(str(folder / "patients.csv")).tolist() == wanted
    datasets = pytest.importorskip("datasets")
    assert run.predict(datasets.Dataset.from_pandas(table)).tolist() == wanted


def test_wrong_columns_are_named(run: Any) -> None:
    table = patients()
    with refused("missing columns age, stage", "trained on age, sex, dose, stage, smoker"):
        run.predict(table.drop(columns=["age", "stage"]))
    with refused("column sex", "the value x"):
        run.predict(table.assign(sex="x"))
    with refused("column age", "trained on numbers"):
        run.predict(table.assign(age="old"))
    with refused("there is no nowhere.csv"):
        run.predict("nowhere.csv")
    with refused("inputs are not numbers"):
        run.predict(np.array([["a"] * 8]))
    with refused("for one record give x[None]"):
        run.predict(encode(table)[0])


def test_a_reversed_frame_keeps_its_accuracy(tmp_path: Path) -> None:
    cancer = load_breast_cancer(as_frame=True)
    x, y = cancer.data, cancer.target
    for data in ((x, y), load_breast_cancer()):  # the names are those of a frame, or of a Bunch
        found = pdsl.train("softmax", data, out=tmp_path / str(type(data)), **QUICK)
        predicted = pdsl.load(tmp_path / str(type(data))).predict(x)
        assert (predicted == found.predict(x[x.columns[::-1]])).all()
        assert (predicted == found.predict(x.to_numpy())).all()
        assert (predicted == found.predict(cancer)).all()


def test_a_frame_with_categories_of_numbers(tmp_path: Path) -> None:
    table = patients().drop(columns=["sex", "stage"])
    table["dose"] = pd.Categorical(table["dose"], range(1, 9))
    pdsl.train("softmax", table, target="outcome", owner="clinic", out=tmp_path / "run", **QUICK)
    run = pdsl.load(tmp_path / "run")
    wanted = run.predict(table).tolist()
    assert run.predict(table.astype({"dose": int})).tolist() == wanted
    assert [run.predict(table.iloc[i])[0] for i in range(5)] == wanted[:5]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(10, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.out((self.table(ids) * mask[..., None]).sum(1))  # type: ignore[no-any-return]


def test_several_named_inputs() -> None:
    datasets = pytest.importorskip("datasets")
    rng = np.random.default_rng(0)
    ids, mask = rng.integers(0, 10, (90, 6)), rng.integers(0, 2, (90, 6))
    label = (ids[:, 0] > 4).astype(int)
    given = {"ids": ids, "mask": mask, "label": label}
    dataset = datasets.Dataset.from_dict({name: values.tolist() for name, values in given.items()})
    found = pdsl.train(Two(), dataset, graph=pdsl.ring(3), **QUICK)
    wanted = found.model(torch.tensor(ids), torch.tensor(mask)).argmax(1).tolist()
    transformed = dataset.with_transform(lambda batch: batch)
    for form in (dataset, transformed, dataset.to_pandas(), given, {"mask": mask, "ids": ids}):
        assert found.predict(form).tolist() == wanted
    with refused("missing input mask"):
        found.predict({"ids": ids})


def test_images_are_divided_once(tmp_path: Path) -> None:
    datasets, image = pytest.importorskip("datasets"), pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (90, 5, 5)).astype(np.uint8)
    labels = (pixels[:, 0, 0] > 127).astype(int)
    images = [image.fromarray(picture) for picture in pixels]
    features = datasets.Features({"picture": datasets.Image(), "label": datasets.Value("int64")})
    dataset = datasets.Dataset.from_dict({"picture": images, "label": labels.tolist()}, features=features)
    found = pdsl.train("softmax", dataset, graph=pdsl.ring(3), out=tmp_path / "run", **QUICK)
    wanted = found.model(torch.tensor(pixels)[:, None] / 255).argmax(1).tolist()
    run = pdsl.load(tmp_path / "run")
    items: Any = [(picture, 0) for picture in images]
    for form in (dataset, dataset.remove_columns("label"), pixels, Items(items), {"picture": pixels}):
        assert run.predict(form).tolist() == found.predict(form).tolist() == wanted


class Items(torch.utils.data.Dataset[Any]):
    def __init__(self, items: list[Any]):
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def test_torch_data_and_npz_files(tmp_path: Path) -> None:
    x = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    found = pdsl.train("softmax", TensorDataset(x, y), graph=pdsl.ring(3), **QUICK)
    np.savez(tmp_path / "x.npz", x=x.numpy(), y=y.numpy())
    wanted = found.model(x).argmax(1).tolist()
    for form in (x, TensorDataset(x, y), TensorDataset(x), tmp_path / "x.npz", x.tolist(), pd.DataFrame(x.numpy())):
        assert found.predict(form).tolist() == wanted


def test_probabilities(tmp_path: Path) -> None:
    x = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
    names = [[name for name, value in zip("pqr", row, strict=False) if value > 0] for row in x.tolist()]
    kinds: dict[str, tuple[Any, Any]] = {
        "multiclass": ("softmax", (x[:, 0] > 0).long() + (x[:, 1] > 1).long()),
        "binary": (nn.Linear(4, 1), (x[:, 0] > 0).long()),
        "multilabel": ("softmax", names),
    }
    for kind, (model, y) in kinds.items():
        found = pdsl.train(model, (x, y), graph=pdsl.ring(3), out=tmp_path / kind, **QUICK)
        run = pdsl.load(tmp_path / kind, model=None if isinstance(model, str) else model)
        p, outputs = run.predict_proba(x), found.model(x).detach().double()
        assert found.experiment.task.kind == kind
        if kind == "multiclass":
            assert np.allclose(p, outputs.exp() / outputs.exp().sum(1, keepdim=True))
            assert (p.argmax(1) == run.predict(x)).all()
        elif kind == "binary":
            assert np.allclose(p, torch.cat([1 / (1 + outputs.exp()), 1 / (1 + (-outputs).exp())], 1))
            assert (p.argmax(1) == run.predict(x)).all()
        else:
            assert np.allclose(p, 1 / (1 + (-outputs).exp()))
            assert ((p > 0.5) == run.predict(x)).all()
            assert run.class_names == ("p", "q", "r")
        assert (p == found.predict_proba(x)).all()
        assert run.class_names == found.class_names
        assert len(run.class_names) == p.shape[1]
    found = pdsl.train("softmax", (x, x[:, 0]), graph=pdsl.ring(3), **QUICK)
    with refused("regression has no probabilities"):
        found.predict_proba(x)


def test_the_file_has_the_schema_and_nothing_observed(folder: Path, trained: pdsl.Result) -> None:
    """Declared categories are stored even if no record has them; the values of numbers, owners and targets are not."""
    with safe_open(folder / "run/model.safetensors", framework="pt") as file:
        stored = file.metadata()["pdsl"]
    assert '"columns": {"age": [], "sex": ["f", "m"], "dose": [], "stage": ["i", "ii", "iii"], "smoker": []}' in stored
    table = patients()
    declared = {**CATEGORIES, "stage": [*CATEGORIES["stage"], "iv"]}
    found = pdsl.train("softmax", table, target="outcome", owner="clinic", categories=declared, **QUICK)
    assert found.experiment.data.schema["stage"] == ("i", "ii", "iii", "iv")
    assert "clinic" not in stored


def test_cards_name_task_data_and_test_records(tmp_path: Path, trained: pdsl.Result) -> None:
    x = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
    found = pdsl.train("softmax", (x, (x[:, 0] > 0).float()), graph=pdsl.ring(3), out=tmp_path / "run", **QUICK)
    tested = f"{len(found.experiment.test[1])} test records"
    card, model_card = repr(found), (tmp_path / "run/README.md").read_text()
    for text in (card, found._repr_html_(), model_card):
        assert tested in text
        assert "regression of 1 number" in text
        assert "custom data" in text
        assert "on python" not in text
    report = (tmp_path / "run/report.html").read_text()
    assert "custom data" in report
    assert "on python" not in report
    assert found.summary["data"] == "python"
    assert "multiclass, 2 classes" in repr(trained)


def test_the_summary_has_the_number_of_parameters(trained: pdsl.Result, folder: Path) -> None:
    wanted = sum(p.numel() for p in trained.model.parameters())
    assert trained.summary["parameters"] == pdsl.load(folder / "run").summary["parameters"] == wanted
