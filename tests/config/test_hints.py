"""Names that people bring from other libraries: each error line names the right setting."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pdsl as package
from pdsl.algorithms import ALGORITHMS
from pdsl.aliases import ALIASES, NO_SETTING
from pdsl.config import describe, hint, load
from pdsl.settings import PartitionSettings
from tests.helpers.commands import pdsl
from tests.helpers.refusals import refused

NAMES = {name for kind in ALGORITHMS.values() for name, _, _ in describe(kind)}
ALGORITHM_LIST = "'pdsl algorithms' lists them"

SET: dict[str, list[str]] = {
    "lr=0.3": ["did you mean algorithm.learning_rate?", "--set algorithm.learning_rate=0.3"],
    "algorithm.lr=1": ["did you mean algorithm.learning_rate?", 'algorithm={"learning_rate": 1}'],
    "LR=1": ["--set algorithm.learning_rate=1"],
    "epochs=10": ["did you mean rounds?", "--set rounds=10", "in Python, rounds=10"],
    "epsilon=4": ["--set privacy.target_epsilon=4", 'privacy={"target_epsilon": 4}'],
    "privacy.epsilon=4": ["--set privacy.target_epsilon=4"],
    "loss=mse": ["did you mean task.loss?"],
    "criterion=mse": ["did you mean task.loss?"],
    "scheduler=cosine": ["--set algorithm.schedule.kind=cosine", 'algorithm={"schedule": {"kind": "cosine"}}'],
    "scheduler=plateau": ["--set algorithm.schedule.kind=…"],
    "val_size=9": ["--set data.validation=9", "in Python, validation=9"],
    "optimizer=adam": ["did you mean algorithm.name?", ALGORITHM_LIST],
    "batch-size=3": ["--set batch.size=3"],
    "participation=.5": ["every agent takes part in every round"],
    "privcy={}": ["did you mean privacy?"],
    "privcy.mode=none": ["did you mean privacy.mode?"],
    "kind=ring": ["did you mean partition.kind or graph.kind or task.kind?"],
    "callbacks=1": ["'pdsl config' lists all settings"],
}


@pytest.mark.parametrize("assignment", SET)
def test_an_unknown_setting_names_the_right_one(assignment: str) -> None:
    with refused("unknown setting", *SET[assignment]):
        load(None, [assignment])


def test_a_setting_of_another_algorithm_is_not_suggested_for_itself() -> None:
    with refused("this algorithm has no setting algorithm.momentum", "these have: pdsl"):
        load(None, ["algorithm.name=muffliato", "algorithm.momentum=.5"])


OPTIONS: dict[str, list[str]] = {
    "run --lr 3": ["no option --lr", "--set algorithm.learning_rate=3"],
    "run --lr=3": ["--set algorithm.learning_rate=3"],
    "run --epsilon 4": ["--set privacy.target_epsilon=4"],
    "run --epochs 4": ["--set rounds=4"],
    "run --rounds 4": ["--set rounds=4"],
    "run --lr": ["--set algorithm.learning_rate=…"],
    "run --kind ring": ["partition.kind or graph.kind"],
    "run --jsn": ["did you mean --json?"],
    "run --nothing": ["no option --nothing", "--help"],
    "compare --batch-size 8": ["--set batch.size=8"],
    "privacy --epsilon 4": ["did you mean --target-epsilon?"],
    "privacy --batch-size 4": ["did you mean --batch?"],
    "report --lr 3": ["no option --lr", "--help"],
}


@pytest.mark.parametrize("command", OPTIONS)
def test_an_unknown_option_names_the_setting_or_the_option(command: str) -> None:
    pdsl(*command.split()).refused(*OPTIONS[command])


@pytest.mark.parametrize(("name", "said"), [("lr", "learning_rate"), ("epochs", "rounds"), ("epsilon", "privacy=")])
def test_keyword_arguments_have_the_same_hints(name: str, said: str) -> None:
    with refused(f"unknown setting {name}", said):
        package.train(**{name: 3})


PYTHON: list[tuple[dict[str, object], str]] = [
    ({"agents": 3}, 'graph={"agents": 3}'),
    ({"device": "cpu"}, 'engine={"device": "cpu"}'),
    ({"learning_rate": 0.5}, 'algorithm={"learning_rate": 0.5}'),
    ({"class_weights": {"a": 1}}, 'task={"class_weights": …}'),
    ({"metrics": 1}, "metric=f"),
    ({"dataset": "mnist"}, 'data="mnist"'),
    ({"batch": 32}, 'batch={"size": 32}'),
    ({"privacy": 8.0}, 'privacy={"target_epsilon": 8.0}'),
    ({"privacy": "none"}, 'privacy={"mode": "none"}'),
    ({"classes": {0: "malignant"}}, 'classes=["benign", "malignant"]'),
    ({"owner": np.arange(3)}, 'owner="hospital"'),
    ({"task": {"class_weights": "balanced"}}, '"public"'),
]


@pytest.mark.parametrize(("arguments", "form"), PYTHON)
def test_a_wrong_keyword_argument_is_answered_with_the_form_in_python(arguments: dict[str, Any], form: str) -> None:
    with refused(form):
        package.train(**arguments)


def test_a_task_is_refused_in_one_line_too() -> None:
    with refused("task.class_weights=balanced", '"public"'):
        package.multiclass(class_weights="balanced")  # type: ignore[arg-type]
    with refused("task.huber"):
        package.regression(huber=-1)


def test_a_partition_may_be_given_by_its_kind() -> None:
    assert load(None, ["partition=iid"]).partition == PartitionSettings(kind="iid")
    assert load(None, ["partition=iid", "partition.minimum=3"]).partition == PartitionSettings(kind="iid", minimum=3)


@pytest.mark.parametrize("kind", ["csv", "parquet", "npz"])
def test_the_extension_of_a_data_file_is_its_name(kind: str) -> None:
    assert load(None, [f"data.path=a/patients.{kind}"]).data.name == kind
    assert load(None, [f"data.path=a/patients.{kind.upper()}"]).data.name == kind
    with refused(f"set data.path=patients.{kind}"):
        load(None, [f"data.name=patients.{kind}"])
    with refused(f"--set data.path=patients.{kind}"):
        load(Path(f"patients.{kind}"))


@pytest.mark.parametrize("setting", ["path=folder", "target=y", "owner=o", "columns=['a']", "test_path=t.csv"])
def test_settings_of_own_data_are_refused_with_a_built_in_data_set(setting: str) -> None:
    pdsl("run", "--set", f"data.{setting}", "--set", "rounds=1").refused(f"data.{setting.partition('=')[0]}", "digits")


def test_every_alias_is_of_a_setting_and_is_none_itself() -> None:
    assert set(ALIASES) <= NAMES
    words = [word for aliases in ALIASES.values() for word in aliases.split()]
    assert len(set(words)) == len(words)
    assert not set(words) & set(NO_SETTING)
    assert not {word for word in (*words, *NO_SETTING) if word in NAMES}
    for setting, aliases in ALIASES.items():
        assert all(setting in (hint(word) or "") for word in aliases.split())
