"""The Python API: any model, any data, any graph; what comes out; and what must not be touched."""

import copy
import inspect
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import networkx
import numpy as np
import pytest
import torch
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import pdsl
from pdsl import options
from pdsl.config import load
from pdsl.metrics import accuracy
from pdsl.settings import (
    AttackSettings,
    BatchSettings,
    DataSettings,
    EngineSettings,
    GraphSettings,
    MixingSettings,
    ModelSettings,
    PartitionSettings,
    PrivacySettings,
    PublicSettings,
    TaskSettings,
)
from pdsl.training.trainer import build_trainer
from pdsl.utils.workers import Workers
from tests.helpers.commands import pdsl as command
from tests.helpers.refusals import refused

SMALL: dict[str, Any] = {"privacy": {"mode": "none"}, "rounds": 3, "batch": {"size": 8}, "engine": {"workers": 2}}


def blobs(n: int = 120, classes: int = 3) -> tuple[Tensor, Tensor]:
    """Records that a linear model can tell apart."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(n) % classes
    return torch.randn(n, 5, generator=generator) + 3 * torch.eye(5)[y], y


def linear() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Linear(5, 3)


def train(model: Any = None, data: Any = None, **settings: Any) -> pdsl.Result:
    arguments: dict[str, Any] = {"graph": pdsl.ring(4), **SMALL, **settings}
    return pdsl.train(linear() if model is None else model, blobs() if data is None else data, **arguments)


@pytest.fixture(scope="module")
def result() -> pdsl.Result:
    return train(rounds=30, algorithm=pdsl.PDSL(learning_rate=0.5))


def test_it_learns(result: pdsl.Result) -> None:
    assert result.accuracy > 0.9
    assert result.accuracy_of_mean > 0.9
    assert result.loss is not None
    assert result.loss < result.rows[0]["loss"] / 2
    assert [row["round"] for row in result.rows] == list(range(1, 31))
    assert result.rows[-1]["accuracy"] == result.accuracy


def test_every_model_is_the_one_that_was_measured(result: pdsl.Result) -> None:
    inputs, labels = result.experiment.test
    each = [accuracy(model(inputs).argmax(-1), labels) for model in result.models]
    assert each == result.summary["accuracy_per_agent"]
    assert accuracy(result.model(inputs).argmax(-1), labels) == result.accuracy_of_mean
    assert all(type(model) is nn.Linear for model in result.models)
    mean = torch.stack([model.weight for model in result.models]).mean(0)  # type: ignore[misc]
    assert torch.allclose(result.model.weight, mean)  # type: ignore[arg-type]


def test_message_values_are_one_per_round_and_edge(result: pdsl.Result) -> None:
    ring = {(i, j) for i in range(4) for j in ((i - 1) % 4, i, (i + 1) % 4)}
    assert set(result.edges) == ring
    assert result.edges == sorted(result.edges)
    assert result.message_values.shape == (30, len(ring))
    assert result.message_values.tolist() == [row["shapley"]["phi"] for row in result.rows]


def test_the_loop_gives_what_train_gives(result: pdsl.Result) -> None:
    settings: dict[str, Any] = {**SMALL, "rounds": 30}
    steps = list(pdsl.rounds(linear(), blobs(), graph=pdsl.ring(4), algorithm=pdsl.PDSL(learning_rate=0.5), **settings))
    assert [step.row for step in steps] == result.rows
    assert torch.equal(steps[-1].state.x, result.state.x)
    assert [step.t for step in steps] == list(range(1, 31))


def halves() -> list[tuple[Tensor, Tensor]]:
    x, y = blobs()
    return [(x[:60], y[:60]), (x[60:], y[60:])]


DATA: dict[str, Callable[[], Any]] = {
    "tensors": blobs,
    "arrays": lambda: tuple(a.numpy() for a in blobs()),
    "Dataset": lambda: TensorDataset(*blobs()),
    "with test data": lambda: (blobs(), blobs(30)),
    "Dataset with test data": lambda: (TensorDataset(*blobs()), TensorDataset(*blobs(30))),
    "one per agent": halves,
    "one Dataset per agent": lambda: [TensorDataset(*half) for half in halves()],
    "one per agent, with test data": lambda: (halves(), blobs(30)),
}


@pytest.mark.parametrize("data", DATA.values(), ids=DATA.keys())
def test_data_of_any_kind(data: Callable[[], Any]) -> None:
    found = train(data=data(), graph=pdsl.full(2))
    assert len(found.rows) == 3
    assert found.summary["data"] == "python"
    assert found.summary["agents"] == 2


def test_data_and_models_by_name() -> None:
    found = pdsl.train("softmax", "digits", graph=pdsl.star(3), rounds=2)
    assert found.summary["data"] == "digits"
    assert found.experiment.config.model.name == "softmax"
    assert [p.shape for p in found.model.parameters()] == [(10, 64), (10,)]
    assert found.edges == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 2)]


def test_a_networkx_graph() -> None:
    found = train(graph=networkx.path_graph(3))
    same = train(graph=pdsl.line(3))
    assert found.rows == same.rows
    assert found.edges == same.edges


def test_an_algorithm_brings_its_shapley_settings(tmp_path: Path) -> None:
    wanted = pdsl.Shapley(estimator="montecarlo", permutations=2)
    found = train(algorithm=pdsl.PDSL(learning_rate=0.5, shapley=wanted))
    assert {row["shapley"]["estimator"] for row in found.rows} == {"montecarlo"}
    config = load(found.save(tmp_path / "a") / "config.toml")
    assert config.algorithm == pdsl.PDSL(learning_rate=0.5, shapley=wanted)


def test_uniform_weights_value_nothing() -> None:
    found = train(algorithm=pdsl.PDSL(shapley=pdsl.Shapley(weighting="uniform")))
    assert not found.message_values.any()


def test_nothing_of_the_callers_is_changed() -> None:
    model, (x, y) = linear(), blobs()
    model.train()
    before = copy.deepcopy(model.state_dict()), x.clone(), y.clone()
    torch.manual_seed(5)
    np.random.seed(5)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    numbers = np.random.get_state()[1].copy()  # type: ignore[union-attr,index]
    torch.set_num_threads(3)
    try:
        train(model, (x, y))
        pdsl.train("mlp", "digits", rounds=1, graph=pdsl.ring(3))
        assert torch.get_num_threads() == 3
        together = zip(*(pdsl.rounds(model, (x, y), **SMALL) for _ in range(2)), strict=True)
        assert {torch.get_num_threads() for _ in together} == {3}  # in the caller's own turn as well
        assert torch.get_num_threads() == 3
        next(pdsl.rounds(model, (x, y), **SMALL)).row["round"]  # and left unfinished
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], numbers)  # type: ignore[index]
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(tensor, before[0][name]) for name, tensor in model.state_dict().items())
    assert torch.equal(x, before[1])
    assert torch.equal(y, before[2])


def test_the_callers_generator_does_not_matter() -> None:
    torch.manual_seed(1)
    first = pdsl.train("mlp", "digits", rounds=2, graph=pdsl.ring(3))
    torch.manual_seed(2)
    assert pdsl.train("mlp", "digits", rounds=2, graph=pdsl.ring(3)).rows == first.rows


def test_a_saved_result_is_a_run_directory(result: pdsl.Result, tmp_path: Path) -> None:
    path = result.save(tmp_path / "a")
    assert path == tmp_path / "a"
    rows = [json.loads(line) for line in (path / "rows.jsonl").read_text().splitlines()]
    assert rows == result.rows
    assert json.loads((path / "summary.json").read_text()) == {**result.summary, "run": str(path)}
    outcome = command("report", path)
    assert (outcome.code, outcome.out) == (0, f"{path / 'report.html'}\n")
    command("run", "--resume", path).refused("Python", "pdsl.train")  # no config can name these objects
    with refused(str(path), "already holds a run"):
        result.save(path)


def test_a_saved_result_of_named_things_can_be_extended(tmp_path: Path) -> None:
    pdsl.train("softmax", "digits", rounds=2, privacy={"mode": "none"}).save(tmp_path / "a")
    outcome = command("run", "--json", "--resume", tmp_path / "a", "--set", "rounds=4")
    assert outcome.code == 0
    longer = pdsl.train("softmax", "digits", rounds=4, privacy={"mode": "none"})
    assert json.loads(outcome.out)["models_sha256"] == longer.summary["models_sha256"]


class Tied(nn.Module):
    """Two names for one parameter, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5)
        self.b = nn.Linear(5, 5)
        self.b.weight = self.a.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        scale: Tensor = self.scale  # type: ignore[assignment]
        return self.b(torch.tanh(self.a(x))) * scale  # type: ignore[no-any-return]


def test_the_saved_model_loads_into_the_callers_own(tmp_path: Path) -> None:
    found = train(Tied(), privacy={"clipping": "batch"})
    again = Tied()
    load_model(again, found.save(tmp_path / "a") / "model.safetensors")
    inputs, labels = found.experiment.test
    assert accuracy(again(inputs).argmax(-1), labels) == found.accuracy_of_mean
    assert torch.equal(again(inputs), found.model(inputs))


BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown setting": ({"round": 3}, ["round", "did you mean rounds?"]),
    "wrong type": ({"rounds": "many"}, ["rounds=many"]),
    "wrong section": ({"batch": 3}, ["batch=3"]),
    "one agent in a graph": ({"graph": networkx.empty_graph(1)}, ["at least 2"]),
    "graph in two parts": ({"graph": networkx.empty_graph(3)}, ["not connected"]),
    "directed graph": ({"graph": networkx.DiGraph([(0, 1)])}, ["directed"]),
    "unknown graph": ({"graph": "circle"}, ["graph.kind=circle", "ring"]),
    "no graph": ({"graph": 4}, ["graph", "pdsl.ring"]),
    "unknown setting of a graph": ({"graph": {"nodes": 3}}, ["graph.nodes"]),
    "unknown algorithm": ({"algorithm": "sgd"}, ["no algorithm 'sgd'", "muffliato"]),
    "unknown task": ({"task": "ranking"}, ["task.kind=ranking"]),
    "no task": ({"task": 3}, ["task", "pdsl.regression"]),
    "custom task without a loss": ({"task": "custom"}, ["custom", "needs a loss"]),
    "no loss": ({"loss": "mse"}, ["loss", "function of (outputs, targets)"]),
    "unknown model": ({"model": "resnet"}, ["resnet", "softmax"]),
    "class of a model": ({"model": nn.Linear}, ["model", "class"]),
    "no model": ({"model": object()}, ["model", "torch.nn.Module"]),
    "model without parameters": ({"model": nn.Flatten()}, ["no parameters"]),
    "model of another shape": ({"model": nn.Linear(7, 3)}, ["(5,)"]),
    "model with too few scores": ({"model": nn.Linear(5, 2)}, ["3 classes"]),
    "unknown data set": ({"data": "imagenet"}, ["data.name=imagenet"]),
    "no data": ({"data": 3}, ["int given"]),
    "NaN": ({"data": (torch.full((9, 5), torch.nan), torch.zeros(9))}, ["x[0]", "NaN"]),
    "another number of agents": ({"data": halves(), "graph": pdsl.ring(3)}, ["graph.agents: 3", "graph.agents=2"]),
    "more agents than records": ({"graph": pdsl.ring(100)}, ["100 agents", "93 records"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_refused(case: str) -> None:
    arguments, parts = BAD[case]
    with refused(*parts):
        train(**arguments)
    with refused(*parts):
        # before the first round is asked for
        pdsl.rounds(**{"model": linear(), "data": blobs(), "graph": pdsl.ring(4), **arguments})


def test_a_run_that_diverges_says_so() -> None:
    with refused("diverged in round", "algorithm.learning_rate"):
        train(algorithm=pdsl.PDSL(learning_rate=1e39), privacy={"mode": "noise", "sigma": 1.0})


class Recorder(pdsl.RunListener):
    """Keep the names of the calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_start(self, experiment: Any, path: Any, records: Any) -> None:
        self.calls.append(f"start {experiment.config.rounds} {path} {records}")

    def on_round(self, record: Any) -> None:
        self.calls.append(f"round {record['round']}")

    def on_end(self, summary: Any) -> None:
        self.calls.append(f"end {summary['rounds']}")


def test_a_listener_is_called_at_start_every_round_and_end() -> None:
    recorder = Recorder()
    pdsl.train("softmax", "digits", graph=pdsl.ring(3), rounds=2, callbacks=[recorder], privacy={"mode": "none"})
    assert recorder.calls == ["start 2 None []", "round 1", "round 2", "end 2"]


def test_graphs_algorithms_and_tasks_have_the_names_of_a_config() -> None:
    named = train(graph={"kind": "ring", "agents": 4}, algorithm="muffliato", task="multiclass")
    objects = train(graph=pdsl.ring(4), algorithm=pdsl.ALGORITHMS["muffliato"](), task=pdsl.multiclass())
    assert named.rows == objects.rows
    smooth = train(task=pdsl.multiclass(class_weights=[1, 2, 3], label_smoothing=0.1))
    assert smooth.rows == train(task={"kind": "multiclass", "class_weights": [1, 2, 3], "label_smoothing": 0.1}).rows
    assert smooth.rows != train().rows
    assert pdsl.regression(huber=2.0) == TaskSettings(kind="regression", huber=2.0)
    assert pdsl.binary(class_weights="public") == TaskSettings(kind="binary", class_weights="public")
    assert pdsl.multilabel().kind == "multilabel"


def test_the_number_of_agents_is_that_of_the_data() -> None:
    for graph in (None, "full", {"kind": "line"}):
        assert train(data=halves(), graph=graph).summary["agents"] == 2


def absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).abs()


def largest_error(outputs: Tensor, targets: Tensor) -> float:
    return float((outputs[:, 0] - targets).abs().max())


def test_an_own_loss_and_an_own_metric() -> None:
    found = train(task="custom", loss=absolute_error, metric=largest_error)
    task = found.experiment.config.task
    assert task.kind == "custom"
    assert task.loss == "tests.integration.test_api:absolute_error"
    inputs, targets = found.experiment.test
    assert found.score_of_mean == pytest.approx(absolute_error(found.model(inputs), targets).mean().item())
    assert found.rows[-1]["largest_error"] > 0  # type: ignore[typeddict-item]
    local = train(task="custom", loss=lambda outputs, targets: absolute_error(outputs, targets))
    assert local.experiment.config.task.loss == "python"
    kept = train(loss=absolute_error)  # the targets are classes, and the model has a score for each
    assert kept.experiment.config.task.kind == "multiclass"
    assert "macro_f1" in kept.metrics
    assert local.rows[-1]["loss"] == found.rows[-1]["loss"]


SECTIONS = {
    "privacy": (PrivacySettings, options.PrivacyOptions),
    "public": (PublicSettings, options.PublicOptions),
    "batch": (BatchSettings, options.BatchOptions),
    "partition": (PartitionSettings, options.PartitionOptions),
    "mixing": (MixingSettings, options.MixingOptions),
    "attack": (AttackSettings, options.AttackOptions),
    "engine": (EngineSettings, options.EngineOptions),
    "graph": (GraphSettings, options.GraphOptions),
    "model": (ModelSettings, options.ModelOptions),
    "task": (TaskSettings, options.TaskOptions),
}


def test_signatures_have_every_setting_with_its_default() -> None:
    for function in (pdsl.train, pdsl.rounds):
        parameters = inspect.signature(function).parameters
        for name, field in pdsl.Config.model_fields.items():
            assert name in parameters
            if name not in SECTIONS and name not in ("data", "algorithm"):
                assert parameters[name].default == field.default
        assert set(DataSettings.model_fields) - {"name", "path"} <= set(parameters)
    assert parameters["test_fraction"].default == DataSettings().test_fraction


@pytest.mark.parametrize("section", SECTIONS)
def test_typed_options_are_those_of_the_section(section: str) -> None:
    settings, mapping = SECTIONS[section]
    assert list(mapping.__annotations__) == list(settings.model_fields)
    for name, field in settings.model_fields.items():
        literal = [part for part in (field.annotation, *get_args(field.annotation)) if get_origin(part) is Literal]
        kinds = (mapping.__annotations__[name], *get_args(mapping.__annotations__[name]))
        nested = {inner for part in kinds for inner in (part, *get_args(part))}
        assert all(part in nested for part in literal), name


def test_nothing_prints_records(result: pdsl.Result) -> None:
    step = next(pdsl.rounds(linear(), blobs(), graph=pdsl.ring(4), **SMALL))
    e = result.experiment
    with Workers(1) as workers:
        shown = [result, step, e, e.data, build_trainer(e, workers).local]
        texts = [*map(repr, shown), result._repr_html_()]
    digits = [f"{value:.4f}" for value in e.data.x.flatten().tolist()]
    for text in texts:
        assert len(text) < 1000
        assert "tensor" not in text
        assert not any(number in text for number in digits)
    assert "accuracy" in repr(result)
    assert result._repr_html_().startswith("<table>")


def test_a_loop_that_was_left_has_a_result(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**SMALL, "rounds": 9, "privacy": {"mode": "noise", "sigma": 0.1}}
    settings["algorithm"] = {"learning_rate": 0.5}  # the automatic one depends on the number of rounds
    for step in pdsl.rounds(linear(), blobs(), graph=pdsl.ring(4), **settings):
        if step.t == 3:
            break
    found = step.result("it was good enough")
    shorter = train(**{**settings, "rounds": 3})
    assert found.rows == shorter.rows
    assert torch.equal(found.model.weight, shorter.model.weight)  # type: ignore[arg-type]
    assert torch.equal(step.model.weight, shorter.model.weight)  # type: ignore[arg-type]
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(step.models, shorter.models, strict=True))  # type: ignore[arg-type]
    assert found.epsilon == shorter.epsilon
    assert found.summary["stopped"] == "after round 3 of 9: it was good enough"
    assert json.loads((found.save(tmp_path / "a") / "summary.json").read_text())["rounds"] == 3


def test_leaving_python_in_the_middle_of_a_loop_prints_nothing() -> None:
    program = "import pdsl; it = pdsl.rounds('softmax', 'digits', rounds=3, privacy={'mode': 'none'}); next(it)"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")


def test_a_saved_private_result_can_be_audited(tmp_path: Path) -> None:
    private: dict[str, Any] = {"privacy": {"randomness": "system"}, "batch": {"records": 20}}
    found = pdsl.train("softmax", "digits", graph={"agents": 3}, rounds=2, **private)
    path = found.save(tmp_path / "a")
    assert (path / "secret.key").stat().st_mode & 0o777 == 0o600
    assert pdsl.load(path).audit(canaries=0).verdict.name == "PASS"


def test_a_result_is_not_pickled(result: pdsl.Result) -> None:
    with refused("private records", "result.save", "pdsl.load"):
        pickle.dumps(result)


def test_progress_is_shown_on_request(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)  # another test may have imported it
    train(progress=True)
    assert "round 3/3" in capsys.readouterr().err
    train()
    assert capsys.readouterr().err == ""
