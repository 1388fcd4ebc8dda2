"""The files of a run directory as values. Everything is checked, because the files may come from anybody."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite

from pdsl.metrics import BASELINES
from pdsl.report.metric import Metric
from pdsl.report.names import AgentNames, ClassNames
from pdsl.utils.types import JsonDict

Fields = JsonDict
Metrics = Mapping[str, float | None]  # None: not measured, or not finite
Edge = tuple[int, int, float]  # receiver, sender, weight

KINDS = ("multiclass", "binary", "multilabel", "regression", "custom")  # of tasks
MAX_NAME = 200  # letters of an agent's or a class's name
MAX_VALUE = 1e100  # sums of larger values might not be finite
NOT_NEGATIVE = Metric("value", low=0.0)


@dataclass(frozen=True)
class Task:
    """The kind of task with its headline metric, and its loss."""

    kind: str = "multiclass"
    metric: Metric = field(default_factory=lambda: Metric.of("accuracy"))

    @property
    def loss(self) -> Metric:
        return Metric.of("loss", self.kind, higher_is_better=False)

    @property
    def has_classes(self) -> bool:
        return self.kind in ("multiclass", "binary", "multilabel")

    def round_metrics(self) -> dict[str, Metric | None]:
        """The values of a round by name, with their limits; None: not negative."""
        m = self.metric.name
        limits: dict[str, Metric | None] = dict.fromkeys(("consensus", "bytes", "epsilon"))
        limits |= dict.fromkeys(("loss", "loss_min", "loss_max"), self.loss)
        return limits | dict.fromkeys((m, f"{m}_min", f"{m}_max", f"{m}_of_mean"), self.metric)

    def summary_metrics(self) -> dict[str, Metric | None]:
        m = self.metric.name
        limits: dict[str, Metric | None] = dict.fromkeys(("seconds", "epsilon", "delta", "sigma"))
        return limits | {"loss": self.loss} | dict.fromkeys((m, f"{m}_of_mean"), self.metric)


@dataclass(frozen=True)
class Setup:
    agents: int
    parameters: int
    edges: list[Edge]
    attackers: dict[int, str]  # agent to kind of attack
    graph: str
    data: str
    task: Task
    agent_names: AgentNames
    class_names: ClassNames


@dataclass(frozen=True)
class Round:
    number: int
    metrics: Metrics  # those of Task.round_metrics
    phi: list[float | None]  # Shapley value per edge, None for edges of other rounds; [] if there are none
    share: list[float | None]  # weight per edge, None for edges of other rounds, or []
    per_agent: list[float | None]  # headline metric of each agent; [] if not evaluated, or of a single peer


@dataclass(frozen=True)
class Residuals:
    """Histogram of prediction minus target."""

    bins: list[float]  # edges, one more than counts
    counts: list[int]


@dataclass(frozen=True)
class Summary:
    metrics: Metrics  # those of Task.summary_metrics
    privacy: str
    stopped: str
    notes: list[str]
    adversaries: dict[str, float | None]  # ε against each
    per_agent: list[float | None]  # headline metric
    model_metrics: Metrics  # of the mean model on the test set
    recall: list[float | None]  # of the mean model, by class or label
    confusion: list[list[int]]  # of the mean model: rows are true classes, columns predicted ones; or []
    residuals: Residuals | None
    baselines: Metrics = field(default_factory=dict)  # headline metric by name, see BASELINES
    gain: str = ""  # what collaboration was worth


def _json(text: str) -> Fields:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _number(value: float | None) -> float | None:
    return float(value) if value is not None and isfinite(value) else None


def _checked(values: Fields, limits: Mapping[str, Metric | None]) -> dict[str, float | None]:
    """The named values; ValueError if one is not possible."""
    found = {name: _number(values.get(name)) for name in limits}
    for name, value in found.items():
        (limits[name] or NOT_NEGATIVE).check(value, name)
    return found


def parse_setup(text: str) -> Setup:
    setup = _json(text)
    M = int(setup["agents"])
    edges = [(int(i), int(j), float(omega)) for i, j, omega in setup["edges"]]
    if M < 1:
        raise ValueError(f"{M} agents")
    attackers = {int(i): str(kind) for i, kind in setup.get("attackers", [])}
    if not all(0 <= i < M for edge in edges for i in edge[:2]) or not all(0 <= i < M for i in attackers):
        raise ValueError(f"an edge or an attacker names an agent that is not among the {M}")
    names = _names(setup.get("names"), "names")
    if names and len(names) != M:
        raise ValueError(f"names are not one for each of {M} agents")
    return Setup(
        agents=M,
        parameters=int(setup["parameters"]),
        edges=edges,
        attackers=attackers,
        graph=str(setup["graph"]),
        data=str(setup["data"]),
        task=_task(setup.get("task")),
        agent_names=AgentNames(() if names == [str(i) for i in range(M)] else names, attackers),
        class_names=ClassNames(_names(setup.get("classes"), "classes")),
    )


def _names(given: object, what: str) -> list[str]:
    """Distinct short printable names; [] if there are none."""
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise ValueError(f"{what} are not a list of names")
    if not all(0 < len(name) <= MAX_NAME and name.isprintable() for name in given) or len(set(given)) < len(given):
        raise ValueError(f"{what} are not distinct printable names of at most {MAX_NAME} letters")
    return given


def _task(given: object) -> Task:
    if given is None:  # a run of an earlier version
        return Task()
    if not isinstance(given, dict) or given.get("kind") not in KINDS:
        raise ValueError(f"task is not one of {', '.join(KINDS)}")
    metric, higher = given.get("metric"), given.get("higher_is_better")
    if (
        not isinstance(metric, str)
        or not metric.isidentifier()
        or len(metric) > MAX_NAME
        or not isinstance(higher, bool)
    ):
        raise ValueError("the task's metric is not a name, or higher_is_better is not true or false")
    return Task(given["kind"], Metric.of(metric, given["kind"], higher))


def parse_labels(text: str, agents: int) -> list[list[int]]:
    labels = [[int(n) for n in of_agent] for of_agent in _json(text)["labels"]]
    if len(labels) != agents or len({len(of_agent) for of_agent in labels}) > 1:
        raise ValueError(f"labels are not one list of the same length for each of {agents} agents")
    if not all(0 <= n < MAX_VALUE for of_agent in labels for n in of_agent):
        raise ValueError("labels are not numbers of records")
    return labels


def parse_rounds(text: str, setup: Setup) -> list[Round]:
    rounds: list[Round] = []
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            found = _round(_json(line), setup)
            if rounds and found.number <= rounds[-1].number:
                raise ValueError(f"round {found.number} comes after round {rounds[-1].number}")
            rounds.append(found)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            if number == len(lines) and not line.endswith("\n"):
                break  # the run was interrupted while it wrote its last row
            raise ValueError(f"line {number}: {error}") from error
    if not rounds:
        raise ValueError("no round has ended yet")
    return rounds


def _round(row: Fields, setup: Setup) -> Round:
    edges = len(setup.edges)
    shapley = row.get("shapley") or {"phi": [], "share": []}
    phi, share = ([None if v is None else float(v) for v in shapley[name]] for name in ("phi", "share"))
    finite = all(v is None or abs(v) < MAX_VALUE for v in (*phi, *share))
    if not finite or any(len(values) not in (0, edges) for values in (phi, share)):
        raise ValueError(f"Shapley values are not one finite number for each of {edges} edges")
    if not 0 <= row["round"] < MAX_VALUE:
        raise ValueError(f"round cannot be {row['round']:g}")
    metrics = _checked(row, setup.task.round_metrics())
    per_agent = _per_agent(row.get("per_agent"), setup, "per_agent")
    return Round(int(row["round"]), metrics, phi, share, per_agent)


def _per_agent(given: object, setup: Setup, what: str) -> list[float | None]:
    """The headline metric of each agent. A peer knows its own only: then []."""
    if given is None:
        return []
    if not isinstance(given, list) or len(given) not in (1, setup.agents):
        raise ValueError(f"{what} is not one number for each of {setup.agents} agents")
    values = [_number(value) for value in given]
    for value in values:
        setup.task.metric.check(value, what)
    return values if len(values) == setup.agents else []


def parse_summary(text: str, setup: Setup) -> Summary:
    summary, task = _json(text), setup.task
    given = summary.get("metrics") or {}
    if not isinstance(given, dict):
        raise ValueError("metrics is not a JSON object")
    scalars = {str(name): value for name, value in given.items() if isinstance(value, int | float) or value is None}
    limits = {name: task.loss if name == "loss" else Metric.of(name, "custom") for name in scalars}
    return Summary(
        metrics=_checked(summary, task.summary_metrics()),
        privacy=str(summary.get("privacy") or ""),
        stopped=str(summary.get("stopped") or ""),
        notes=[str(note) for note in summary.get("notes") or []],
        adversaries={str(name): _number(epsilon) for name, epsilon in (summary.get("adversaries") or {}).items()},
        per_agent=_per_agent(summary.get(f"{task.metric.name}_per_agent"), setup, f"{task.metric.name}_per_agent"),
        model_metrics=_checked(scalars, limits),
        recall=_recall(given.get("recall"), setup.class_names),
        confusion=_confusion(summary.get("confusion") or given.get("confusion"), setup.class_names),
        residuals=_residuals(summary.get("residuals") or given.get("residuals")),
        baselines=_baselines(summary.get("baselines") or {}, task),
        gain=str(summary.get("gain") or ""),
    )


def _baselines(given: object, task: Task) -> Metrics:
    if not isinstance(given, dict) or not given.keys() <= BASELINES.keys():
        raise ValueError(f"baselines are not among {', '.join(BASELINES)}")
    return _checked(given, dict.fromkeys(given, task.metric))


def _recall(given: object, classes: ClassNames) -> list[float | None]:
    """Recall by class: a list, or an object by the names of the classes."""
    if given is None:
        return []
    if isinstance(given, dict):
        names = list(classes.names) or [str(k) for k in range(len(given))]
        given = [given[name] for name in names] if set(names) == set(given) else None
    if not isinstance(given, list) or (classes.names and len(given) != len(classes.names)):
        raise ValueError("recall is not one number for each class")
    values = [_number(value) for value in given]
    for value in values:
        Metric.of("recall").check(value)
    return values


def _confusion(given: object, classes: ClassNames) -> list[list[int]]:
    if given is None:
        return []
    rows = [_counts(row) for row in given] if isinstance(given, list) else []
    if not rows or any(len(row) != len(rows) for row in rows) or len(classes.names) not in (0, len(rows)):
        raise ValueError("confusion is not a square of counts with one row for each class")
    return rows


def _residuals(given: object) -> Residuals | None:
    if given is None:
        return None
    if not isinstance(given, dict):
        raise ValueError("residuals are not a JSON object")
    bins, counts = [float(edge) for edge in given["bins"]], _counts(given["counts"])
    increasing = all(a < b for a, b in pairwise(bins))
    if not counts or len(bins) != len(counts) + 1 or not increasing or not all(abs(e) < MAX_VALUE for e in bins):
        raise ValueError("residuals are not counts between increasing edges")
    return Residuals(bins, counts)


def _counts(given: object) -> list[int]:
    if not isinstance(given, list) or not all(isinstance(n, int) and 0 <= n < MAX_VALUE for n in given):
        raise ValueError("counts are not whole numbers")
    return given
