"""Every task trains, is valued, audited and measured; with several inputs, integers and frozen parts."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pdsl.auditing import audit_experiment
from pdsl.auditing.report import Verdict
from pdsl.config import validate
from pdsl.data import Data
from pdsl.tasks import Loss
from pdsl.training.evaluation import final_evaluation, measure_model
from pdsl.training.experiment import Experiment, prepare
from pdsl.training.trainer import rounds
from pdsl.utils.inputs import Fields, Inputs
from tests.helpers.refusals import refused

AGENTS, RECORDS, PUBLIC, FEATURES = 3, 240, 120, 6


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, TEST_X = normal(0, RECORDS, FEATURES), normal(1, PUBLIC, FEATURES)
PROJECTION = normal(2, FEATURES, 3)


def targets(x: Tensor, kind: str) -> Tensor:
    scores = x @ PROJECTION
    return {
        "multiclass": scores.argmax(1),
        "binary": (scores[:, 0] > 0).long(),
        "multilabel": (scores > 0).long(),
        "regression": 100 + 10 * scores[:, 0],
        "custom": scores[:, 0],
    }[kind]


def linear(outputs: int) -> nn.Module:
    layer = nn.Linear(FEATURES, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).abs()


CLASSES = {"multiclass": 3, "binary": 2, "multilabel": 3, "regression": 0, "custom": 0}
OUTPUTS = {"multiclass": 3, "binary": 1, "multilabel": 3, "regression": 1, "custom": 1}


def experiment(
    kind: str, model: nn.Module | None = None, x: Inputs = X, test_x: Inputs = TEST_X, **settings: object
) -> Experiment:
    loss: Loss | None = absolute if kind == "custom" else None
    data = Data("python", x, targets(X, kind), test_x, targets(TEST_X, kind), CLASSES[kind])
    values = {
        "rounds": 12,
        "graph": {"kind": "full", "agents": AGENTS},
        "data": {"name": "python"},
        "model": {"name": "python" if model else "mlp"},
        "task": {"kind": kind, **({"loss": "python"} if loss else {})},
        "batch": {"size": 40, "records": 80},
        "partition": {"kind": "iid"},
        **settings,
    }
    return prepare(validate(values, "test"), model=model, data=data, loss=loss)


def score(e: Experiment) -> float:
    *_, last = rounds(e)
    return final_evaluation(e, last.state.x).score


@pytest.mark.parametrize("kind", CLASSES)
def test_every_task_learns(kind: str) -> None:
    e = experiment(kind, linear(OUTPUTS[kind]), algorithm={"name": "pdsl", "learning_rate": 1.0})
    before = final_evaluation(e, torch.stack([e.network.initial_parameters()])).score
    after = score(e)
    assert after > before + 0.2 if e.task.higher_is_better else after < 0.7 * before
    row = next(iter(rounds(e))).row
    assert e.task.metric in row and "shapley" in row
    found = measure_model(e, e.network.initial_parameters())
    assert kind == "custom" or e.task.metric in found


@pytest.mark.parametrize("kind", ["binary", "multilabel", "regression"])
def test_a_built_in_model_has_the_outputs_of_the_task(kind: str) -> None:
    e = experiment(kind)
    assert e.network.outputs(e.network.initial_parameters(), TEST_X[:2]).shape == (2, OUTPUTS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["binary", "multilabel", "regression", "custom"])
def test_the_audit_passes_for_every_task(kind: str) -> None:
    e = experiment(kind, linear(OUTPUTS[kind]), rounds=6)
    steps = list(rounds(e))
    ledger = steps[-1].ledger
    assert ledger is not None
    findings = audit_experiment(e, ledger, [step.row for step in steps], ledger.epsilon_per_agent)
    assert [finding for finding in findings if finding.verdict != Verdict.PASS] == []


def test_class_weights_raise_the_recall_of_a_rare_class() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = 0.6 * torch.randn(4, FEATURES, generator=generator)

    def draw(n: int) -> tuple[Tensor, Tensor]:
        y = torch.multinomial(torch.tensor([0.5, 0.3, 0.15, 0.05]), n, replacement=True, generator=generator)
        return centres[y] + 1.5 * torch.randn(n, FEATURES, generator=generator), y

    (x, y), (test_x, test_y) = draw(1500), draw(1000)
    recalls = []
    for weights in (None, "public"):
        values = {
            "rounds": 30,
            "graph": {"kind": "full", "agents": AGENTS},
            "data": {"name": "python"},
            "model": {"name": "softmax"},
            "task": {"class_weights": weights},
            "batch": {"size": 100, "records": 500},
            "partition": {"kind": "iid"},
        }
        e = prepare(validate(values, "test"), data=Data("python", x, y, test_x, test_y, 4))
        *_, last = rounds(e)
        recalls.append(measure_model(e, last.state.x[0])["recall"]["3"])
    assert recalls[1] > recalls[0] + 0.2


class Two(nn.Module):
    """A model with two inputs, of which one is an integer, and a mapping as output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(FEATURES + 4, 3)

    def forward(self, numbers: Tensor, category: Tensor) -> dict[str, Tensor]:
        assert category.dtype == torch.int64
        return {"logits": self.head(torch.cat([numbers, self.embedding(category)], dim=1))}


@pytest.mark.parametrize("names", [None, ("numbers", "category")])
def test_models_with_several_inputs_and_integers(names: tuple[str, ...] | None) -> None:
    def fields(x: Tensor) -> Fields:
        return Fields([x, torch.arange(len(x)) % 7], names)

    torch.manual_seed(0)
    e = experiment("multiclass", Two(), fields(X), fields(TEST_X))
    assert score(e) > 0.6


def test_a_frozen_backbone_is_not_sent() -> None:
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh()).requires_grad_(False)
    e = experiment("multiclass", nn.Sequential(backbone, nn.Linear(32, 3)))
    assert e.network.num_parameters == 32 * 3 + 3
    *_, last = rounds(e)
    assert last.row["bytes"] == last.row["messages"] * 4 * e.network.num_parameters
    module = e.network.to_module(last.state.x[0])
    assert torch.equal(module[0][0].weight, backbone[0].weight)
    assert final_evaluation(e, last.state.x).score > 0.6


def test_def_kt_needs_classes() -> None:
    with refused("def-kt", "multiclass", "regression"):
        experiment("regression", algorithm={"name": "def-kt"})


@pytest.mark.parametrize(("kind", "flipped"), [
    ("multiclass", lambda y: 2 - y), ("binary", lambda y: 1 - y), ("multilabel", lambda y: 1 - y),
])  # fmt: skip
def test_label_flippers_flip_the_targets_of_the_task(kind: str, flipped: Callable[[Tensor], Tensor]) -> None:
    e = experiment(kind, attack={"label_flip": 1})
    (attacker,) = e.attackers
    assert torch.equal(e.training_labels(attacker), flipped(e.data.y[e.parts[attacker]]))


def test_targets_of_a_custom_task_cannot_be_flipped() -> None:
    e = experiment("custom", linear(1), attack={"label_flip": 1})
    with refused("attack.label_flip", "custom"):
        e.training_labels(next(iter(e.attackers)))
