"""`pdsl.load`: from a run directory back to a model, predictions and an audit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from sklearn.datasets import load_digits
from torch import Tensor, nn

import pdsl
from pdsl.config import validate
from pdsl.data import load as load_data
from pdsl.data.datasets import parse_idx
from pdsl.data.download import data_root, read
from pdsl.runs import runner
from pdsl.settings import DataSettings
from pdsl.utils.random import Streams
from tests.helpers.real_data import real
from tests.helpers.refusals import refused

QUICK: dict[str, Any] = {"graph": {"kind": "ring", "agents": 4}, "engine": {"workers": 2}, "rounds": 3}
NOT_PRIVATE: dict[str, Any] = {"mode": "none"}


def raw_test_records(found: pdsl.Result, images: Any, labels: Any) -> tuple[Any, Any]:
    """The raw records that became the test set, in its order."""
    places = {row.tobytes(): n for n, row in enumerate(load_scaled(found, images))}
    chosen = [places[row.numpy().tobytes()] for row in found.experiment.test[0]]
    return images[chosen], labels[chosen]


def load_scaled(found: pdsl.Result, images: Any) -> Any:
    white, mean, deviation = {"digits": (16, 0.3053, 0.3760), "mnist": (255, 0.0, 0.3081)}[found.summary["data"]]
    pixels = torch.tensor(np.asarray(images), dtype=torch.float32)[:, None]
    return (pixels.div(white).sub(torch.tensor(mean)).div(torch.tensor(deviation))).numpy()


def test_digits_from_raw_pixels(tmp_path: Path) -> None:
    digits = load_digits()
    found = pdsl.train("mlp", "digits", out=tmp_path / "run", **QUICK)
    x, y = raw_test_records(found, digits.images, digits.target)
    run = pdsl.load(tmp_path / "run")
    assert (run.predict(x) == y).mean() == found.accuracy_of_mean == run.metrics["accuracy"]
    assert (found.predict(x.reshape(-1, 64)) == y).mean() == found.accuracy_of_mean
    assert [(model(found.experiment.test[0]).argmax(1).numpy() == y).mean() for model in run.models] == found.summary[
        "accuracy_per_agent"  # type: ignore[typeddict-item]
    ]
    assert run.rows == found.rows
    assert run.summary == found.summary
    assert run.config == found.experiment.config
    assert run.audit(canaries=0).verdict.name == "PASS"
    with refused("(7,)", "(1, 8, 8)"):
        run.predict(np.zeros((3, 7)))


@pytest.mark.slow
def test_mnist_from_raw_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSL_DATA", str(real("mnist")))
    images, labels = (
        parse_idx(read("mnist", f"t10k-{part}-ubyte.gz", data_root()), part) for part in ("images-idx3", "labels-idx1")
    )
    found = pdsl.train("auto", "mnist", out=tmp_path / "run", **{**QUICK, "rounds": 2})
    x, y = raw_test_records(found, images, labels)
    run = pdsl.load(tmp_path / "run")
    assert (run.predict(x) == y).mean() == found.accuracy_of_mean
    assert run.predict(x[:1])[0] in range(10)
    assert type(run.model[1]).__name__ == "MaxPool"  # type: ignore[index]


class Tied(nn.Module):
    """Tied weights, a buffer and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.a = nn.Linear(5, 5)
        self.b = nn.Linear(5, 5)
        self.b.weight = self.a.weight
        self.register_buffer("factor", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        factor: Tensor = self.factor  # type: ignore[assignment]
        return self.b(torch.tanh(self.a(self.frozen(x)))) * factor  # type: ignore[no-any-return]


def blobs(n: int = 200) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 3
    return torch.randn(n, 5, generator=generator) + 3 * torch.eye(5)[y], y


def split() -> Any:
    x, y = blobs()
    return (x[:120], y[:120]), (x[120:], y[120:])


def test_a_users_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    own = Tied()
    before = own.a.weight.clone()
    found = pdsl.train(own, split(), out=tmp_path / "run", **QUICK)
    with refused("Tied", "model=Tied(...)", "pdsl.load"):
        _ = pdsl.load(tmp_path / "run").model
    run = pdsl.load(tmp_path / "run", model=own, data=split())
    x, y = found.experiment.test
    assert (run.predict(x) == y.numpy()).mean() == found.accuracy_of_mean
    assert (run.predict(x.numpy()) == found.predict(x)).all()
    for model in (found.model, found.models[0], run.model):
        assert model.a.weight is model.b.weight
        assert torch.equal(model.frozen.weight, own.frozen.weight)
        assert model.factor == 2
    assert torch.equal(own.a.weight, before)
    again = Tied()
    load_model(again, tmp_path / "run/model.safetensors")
    assert torch.equal(again(x), found.model(x))
    assert again.a.weight is again.b.weight
    assert run.audit(canaries=0).verdict.name == "PASS"
    with refused("do not fit", "pass the model"):
        _ = pdsl.load(tmp_path / "run", model=nn.Linear(5, 3)).model


def test_batch_normalisation_gets_the_statistics_of_the_public_set(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    found = pdsl.train(make(), split(), out=tmp_path / "run", **QUICK, privacy={**NOT_PRIVATE, "clipping": "batch"})
    own = make()
    own.load_state_dict(load_file(tmp_path / "run/model.safetensors"))
    x, _ = found.experiment.validation
    hidden = own[0](x)
    assert torch.allclose(own[1].running_mean, hidden.mean(0), atol=1e-5)  # type: ignore[arg-type]
    assert torch.allclose(own[1].running_var, hidden.var(0), rtol=1e-4)  # type: ignore[arg-type]
    assert torch.equal(own.eval()(x), found.model(x))
    assert own[1].momentum == found.model[1].momentum == 0.1  # type: ignore[index]


def train_on(data: pdsl.Data, out: Path, **values: Any) -> pdsl.Result:
    config = validate({**QUICK, "data": {"name": "python"}, "model": {"name": "mlp"}, **values}, "settings")
    found = runner.complete(*runner.open_run(config, out, data=data))
    assert found is not None
    return found


def test_predicted_classes_have_their_names(tmp_path: Path) -> None:
    names = ("ash", "beech", "cedar")
    (x, y), test = split()
    found = train_on(pdsl.Data("trees", x, y, *test, classes=3, class_names=names), tmp_path / "run")
    raw, labels = found.experiment.test
    predicted = pdsl.load(tmp_path / "run").predict(raw)
    assert (predicted == np.array(names)[labels]).mean() == found.accuracy_of_mean
    assert set(predicted) <= set(names)


def test_predicted_numbers_have_the_units_of_the_targets(tmp_path: Path) -> None:
    (x, _), (test_x, _) = split()
    targets = [1000 + 50 * part[:, 0] for part in (x, test_x)]
    data = pdsl.Data("numbers", x, targets[0], test_x, targets[1], classes=0)
    found = train_on(data, tmp_path / "run")
    raw, wanted = found.experiment.test
    errors = pdsl.load(tmp_path / "run").predict(raw).astype(np.float64) - wanted.double().numpy()
    assert np.sqrt(np.mean(errors**2)) == pytest.approx(found.score_of_mean, rel=1e-9)
    assert found.score_of_mean < 500


def test_the_file_has_metadata(tmp_path: Path) -> None:
    pdsl.train("mlp", "digits", out=tmp_path / "run", **QUICK)
    with safe_open(tmp_path / "run/model.safetensors", framework="pt") as file:
        described = json.loads(file.metadata()["pdsl"])
    assert described["architecture"]["name"] == "mlp"
    assert described["scaling"]["white"] == 16
    assert described["task"] == {"kind": "multiclass", "outputs": 10}
    assert described["versions"]["pdsl"] == pdsl.__version__
    raw = load_data(DataSettings(name="digits"), Streams(0))
    assert described["shape"] == list(raw.x.shape[1:])


def test_the_model_card_states_the_privacy(tmp_path: Path) -> None:
    import hashlib

    import yaml

    private = {"randomness": "system"}
    found = pdsl.train("mlp", split(), out=tmp_path / "run", **QUICK, privacy=private, batch={"records": 40})
    card = (tmp_path / "run/README.md").read_text()
    _, header, text = card.split("---\n", 2)
    assert yaml.safe_load(header)["library_name"] == "pdsl"
    ledger = (tmp_path / "run/ledger.json").read_bytes()
    assert found.epsilon is not None
    for part in (
        hashlib.sha256(ledger).hexdigest(),
        "| δ | 1e-05 |",
        "a record added or removed",
        "Poisson",
        "all neighbours of an agent colluding",
        "multiclass",
    ):
        assert part in text
    counts = [len(part) for part in found.experiment.parts]
    assert not any(f" {count} records" in text for count in (*counts, sum(counts)))


def test_a_run_that_is_not_finished_says_so(tmp_path: Path) -> None:
    pdsl.train("mlp", "digits", out=tmp_path / "run", **QUICK)
    for name in ("model.safetensors", "summary.json"):
        (tmp_path / "run" / name).unlink()
    run = pdsl.load(tmp_path / "run")
    assert "not finished" in repr(run)
    for use in (lambda: run.model, lambda: run.summary):
        with refused("not finished", "continue"):
            use()
    with refused("nowhere", "not a run directory"):
        pdsl.load(tmp_path / "nowhere")
