"""Read and validate a run directory."""

import json
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from pdsl.settings import PrivacySettings, ShapleySettings
from pdsl.utils.errors import PdslError
from pdsl.utils.types import JsonDict

Fields = JsonDict
Metrics = Mapping[str, float | None]  # None: not measured, or not finite
Edge = tuple[int, int, float]  # receiver, sender, weight
T = TypeVar("T")

OWNER = "owner.json"  # in a run directory: exact counts of records
ROUND_METRICS = (
    *("consensus", "bytes", "epsilon", "loss", "loss_min", "loss_max"),
    *("accuracy", "accuracy_min", "accuracy_max", "accuracy_of_mean"),
)
SUMMARY_METRICS = ("accuracy", "accuracy_of_mean", "loss", "seconds", "epsilon", "delta", "sigma")
MAX_VALUE = 1e100  # sums of larger values might not be finite


@dataclass(frozen=True)
class Setup:
    agents: int
    parameters: int
    edges: list[Edge]
    attackers: dict[int, str]  # agent to kind of attack
    graph: str
    data: str


@dataclass(frozen=True)
class Round:
    number: int
    metrics: Metrics  # ROUND_METRICS
    phi: list[float | None]  # Shapley value per edge, None for edges of other rounds; [] if there are none
    share: list[float | None]  # weight per edge, None for edges of other rounds, or []


@dataclass(frozen=True)
class Summary:
    metrics: Metrics  # SUMMARY_METRICS
    privacy: str
    stopped: str
    notes: list[str]
    adversaries: dict[str, float | None]  # ε against each
    accuracy_per_agent: list[float | None]


@dataclass(frozen=True)
class Run:
    name: str
    config: Fields
    setup: Setup
    rounds: list[Round]  # at least one
    summary: Summary | None  # None: the run is unfinished
    labels: list[list[int]]  # records of each class of each agent; [] if the reader may not see them

    @property
    def algorithm(self) -> str:
        return str(self.config.get("algorithm", {}).get("name", "—"))

    @property
    def budget(self) -> float | None:
        """The total ε the run may spend; None if no total was set."""
        return PrivacySettings(**self.config.get("privacy", {})).budget

    @property
    def private(self) -> bool:
        """Whether the noise came from the operating system, so that the records are private."""
        return is_private(self.config)

    @property
    def value_function(self) -> str:
        """The `algorithm.shapley.value` setting."""
        return _shapley(self.config).value

    def outcome(self) -> Metrics:
        """Final metrics or, for an unfinished run, those of the last evaluated round."""
        if self.summary:
            return self.summary.metrics
        evaluated = (r.metrics for r in reversed(self.rounds) if r.metrics["accuracy"] is not None)
        return next(evaluated, self.rounds[-1].metrics)

    def epsilon(self) -> float | None:
        """Total ε spent so far."""
        return (self.summary or self.rounds[-1]).metrics["epsilon"]

    def bytes_sent(self) -> int:
        """Bytes sent between all agents."""
        return int(sum(r.metrics["bytes"] or 0 for r in self.rounds))

    def series(self, metric: str) -> list[float | None]:
        """A metric in each round."""
        return [r.metrics[metric] for r in self.rounds]

    def mean_share(self) -> list[float]:
        """Mean weight of each edge over the run; [] for an algorithm without Shapley values."""
        by_edge = zip(*(r.share for r in self.rounds if r.share), strict=True)
        return [mean_present(of_edge) or 0.0 for of_edge in by_edge]

    def relative_share(self) -> list[float]:
        """Mean weight of each edge, relative to an equal share of the messages of its round; [] as in `mean_share`."""
        receivers = [i for i, _, _ in self.setup.edges]
        by_edge = zip(*(_relative(r.share, receivers) for r in self.rounds if r.share), strict=True)
        return [mean_present(of_edge) or 0.0 for of_edge in by_edge]


def _relative(share: list[float | None], receivers: list[int]) -> list[float | None]:
    """Shares times the number of messages that each receiver got in the round."""
    members = Counter(i for i, value in zip(receivers, share, strict=True) if value is not None)
    return [None if value is None else value * members[i] for i, value in zip(receivers, share, strict=True)]


def mean_present(values: Iterable[float | None]) -> float | None:
    """Mean of the values that are there; None if there are none."""
    present = [value for value in values if value is not None]
    return fmean(present) if present else None


def is_private(config: Fields) -> bool:
    privacy = PrivacySettings(**config.get("privacy", {}))
    return privacy.randomness == "system" and privacy.mode != "none"


def read_run(run: Path, owner: bool = False) -> Run:
    """Read a run directory; PdslError if a file is missing or invalid.

    The exact record counts of a private run are read only for their `owner`.
    """
    if not run.is_dir():
        raise PdslError(f"there is no run directory {str(run)!r}; make one with: pdsl run config.toml")
    config = _read(run / "config.toml", _config)
    setup = _read(run / "setup.json", _setup)
    # The summary is read before the rows: once it exists, all rows of a live run have been written.
    summary = _read(run / "summary.json", _summary) if (run / "summary.json").exists() else None
    rounds = _read(run / "rows.jsonl", lambda text: _rounds(text, len(setup.edges)))
    counts = (owner or not is_private(config)) and (run / OWNER).exists()  # a shared directory may lack the file
    labels = _read(run / OWNER, lambda text: _labels(text, setup.agents)) if counts else []
    return Run(str(config.get("name") or run.resolve().name), config, setup, rounds, summary, labels)


def _read(file: Path, parse: Callable[[str], T]) -> T:
    try:
        return parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        problem = error.strerror or "unreadable"
    except KeyError as error:
        problem = f"{error} is missing"
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        problem = " ".join(str(error).split())
    raise PdslError(f"cannot read {str(file)!r} ({problem}); repeat the run with: pdsl run config.toml")


def _config(text: str) -> Fields:
    config = tomllib.loads(text)
    for section in ("algorithm", "privacy"):
        if not isinstance(config.get(section, {}), dict):
            raise ValueError(f"{section} is not a section")
    PrivacySettings(**config.get("privacy", {}))  # validated here, because the report depends on them
    _shapley(config)
    return config


def _shapley(config: Fields) -> ShapleySettings:
    given = config.get("algorithm", {}).get("shapley", {})
    return ShapleySettings(value=given["value"]) if "value" in given else ShapleySettings()


def _json(text: str) -> Fields:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _number(value: float | None) -> float | None:
    return float(value) if value is not None and isfinite(value) else None


def _setup(text: str) -> Setup:
    setup = _json(text)
    M = int(setup["agents"])
    edges = [(int(i), int(j), float(omega)) for i, j, omega in setup["edges"]]
    if M < 1:
        raise ValueError(f"{M} agents")
    attackers = {int(i): str(kind) for i, kind in setup.get("attackers", [])}
    if not all(0 <= i < M for edge in edges for i in edge[:2]) or not all(0 <= i < M for i in attackers):
        raise ValueError(f"an edge or an attacker names an agent that is not among the {M}")
    return Setup(M, int(setup["parameters"]), edges, attackers, str(setup["graph"]), str(setup["data"]))


def _labels(text: str, agents: int) -> list[list[int]]:
    labels = [[int(n) for n in of_agent] for of_agent in _json(text)["labels"]]
    if len(labels) != agents or len({len(of_agent) for of_agent in labels}) > 1:
        raise ValueError(f"labels are not one list of the same length for each of {agents} agents")
    if not all(0 <= n < MAX_VALUE for of_agent in labels for n in of_agent):
        raise ValueError("labels are not numbers of records")
    return labels


def _rounds(text: str, edges: int) -> list[Round]:
    rounds: list[Round] = []
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            found = _round(_json(line), edges)
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


def _round(row: Fields, edges: int) -> Round:
    shapley = row.get("shapley") or {"phi": [], "share": []}
    phi, share = ([None if v is None else float(v) for v in shapley[name]] for name in ("phi", "share"))
    finite = all(v is None or abs(v) < MAX_VALUE for v in (*phi, *share))
    if not finite or any(len(values) not in (0, edges) for values in (phi, share)):
        raise ValueError(f"Shapley values are not one finite number for each of {edges} edges")
    if not 0 <= row["round"] < MAX_VALUE:
        raise ValueError(f"round cannot be {row['round']:g}")
    metrics = {name: _number(row.get(name)) for name in ROUND_METRICS}
    for name, value in metrics.items():
        if value is not None and (value < 0 or (value > 1 + 1e-6 and name.startswith("accuracy"))):
            raise ValueError(f"{name} cannot be {value:g}")
    return Round(int(row["round"]), metrics, phi, share)


def _summary(text: str) -> Summary:
    summary = _json(text)
    return Summary(
        metrics={name: _number(summary.get(name)) for name in SUMMARY_METRICS},
        privacy=str(summary.get("privacy") or ""),
        stopped=str(summary.get("stopped") or ""),
        notes=[str(note) for note in summary.get("notes") or []],
        adversaries={str(name): _number(epsilon) for name, epsilon in (summary.get("adversaries") or {}).items()},
        accuracy_per_agent=[_number(value) for value in summary.get("accuracy_per_agent") or []],
    )
