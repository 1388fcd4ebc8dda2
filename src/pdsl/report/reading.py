"""A run directory as values: read once, checked once."""

import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from pdsl.errors import PdslError
from pdsl.settings import PrivacySettings, ShapleySettings

Fields = dict[str, Any]
T = TypeVar("T")
OWNER = "owner.json"  # in a run directory: exact counts of records

MEASURED = (
    *("consensus", "bytes", "epsilon", "loss", "loss_min", "loss_max"),
    *("accuracy", "accuracy_min", "accuracy_max", "accuracy_of_mean"),
)
SUMMARISED = ("accuracy", "accuracy_of_mean", "loss", "seconds", "epsilon", "delta", "sigma")
HUGE = 1e100  # no value is; sums of larger ones would not be finite


@dataclass(frozen=True)
class Run:
    """What was not measured, or was not finite, is None."""

    name: str
    config: Fields
    setup: Fields
    rows: list[Fields]  # round, MEASURED, and a value per edge of phi and share, or []
    summary: Fields | None  # None: the run is unfinished
    labels: list[list[int]]  # records of each class of each agent; [] where they are not for this reader

    @property
    def algorithm(self) -> str:
        return str(self.config.get("algorithm", {}).get("name", "—"))

    @property
    def budget(self) -> float | None:
        """The total ε that the run was to stay within; None where none was set."""
        return PrivacySettings(**self.config.get("privacy", {})).budget

    @property
    def private(self) -> bool:
        """Whether noise came from the operating system: then records are private, and not a simulation's."""
        return is_private(self.config)

    @property
    def worth(self) -> str:
        """What messages were valued by, one of `shapley.value`."""
        return _valuing(self.config).value

    @property
    def rogues(self) -> dict[int, str]:
        """Agents that spoil what they send, and how; everybody else is honest."""
        return dict(self.setup["rogues"])

    def outcome(self) -> Fields:
        """How the run ended or, unfinished, stood when it was last evaluated."""
        return self.summary or next((row for row in reversed(self.rows) if row["accuracy"] is not None), self.rows[-1])

    def epsilon(self) -> float | None:
        """The total spent, or spent so far."""
        last = self.summary or self.rows[-1]
        return None if last["epsilon"] is None else float(last["epsilon"])

    def sent(self) -> int:
        """Bytes, between all agents."""
        return int(sum(row["bytes"] or 0 for row in self.rows))

    def mean_share(self) -> list[float]:
        """Of each edge, over the run; [] for an algorithm without shares."""
        return [fmean(of_edge) for of_edge in zip(*(row["share"] for row in self.rows if row["share"]), strict=True)]


def is_private(config: Fields) -> bool:
    privacy = PrivacySettings(**config.get("privacy", {}))
    return privacy.randomness == "system" and privacy.mode != "none"


def read_run(run: Path, owner: bool = False) -> Run:
    """The run in this directory; PdslError when something needed is missing or broken.

    The exact counts of a private run's records are read only for their `owner`.
    """
    if not run.is_dir():
        raise PdslError(f"there is no run directory {str(run)!r}; make one with: pdsl run config.toml")
    config = _read(run / "config.toml", _config)
    setup = _read(run / "setup.json", _setup)
    # Before the rows: where there is a summary, all rows of a run that goes on have been written.
    summary = _read(run / "summary.json", _summary) if (run / "summary.json").exists() else None
    rows = _read(run / "rows.jsonl", lambda text: _rows(text, len(setup["edges"])))
    shown = owner or not is_private(config)
    there = shown and (run / OWNER).exists()  # a directory that was passed on may lack the counts
    labels = _read(run / OWNER, lambda text: _labels(text, setup["agents"])) if there else []
    return Run(str(config.get("name") or run.resolve().name), config, setup, rows, summary, labels)


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
    for section in ("algorithm", "shapley", "privacy"):
        if not isinstance(config.get(section, {}), dict):
            raise ValueError(f"{section} is not a section")
    PrivacySettings(**config.get("privacy", {}))  # what is drawn depends on them
    _valuing(config)
    return config


def _valuing(config: Fields) -> ShapleySettings:
    asked = config.get("shapley", {})
    return ShapleySettings(value=asked["value"]) if "value" in asked else ShapleySettings()


def _json(text: str) -> Fields:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _number(value: Any) -> float | None:
    return float(value) if value is not None and isfinite(value) else None


def _setup(text: str) -> Fields:
    setup = _json(text)
    M = int(setup["agents"])
    edges = [(int(i), int(j), float(omega)) for i, j, omega in setup["edges"]]
    if M < 1:
        raise ValueError(f"{M} agents")
    rogues = [(int(i), str(kind)) for i, kind in setup.get("rogues", [])]
    if not all(0 <= i < M for edge in edges for i in edge[:2]) or not all(0 <= i < M for i, _ in rogues):
        raise ValueError(f"an edge or a rogue names an agent that is not among the {M}")
    described = {name: str(setup[name]) for name in ("graph", "data")}
    counted = {"agents": M, "parameters": int(setup["parameters"])}
    return {**counted, "edges": edges, "rogues": rogues, **described}


def _labels(text: str, agents: int) -> list[list[int]]:
    labels = [[int(n) for n in of_agent] for of_agent in _json(text)["labels"]]
    if len(labels) != agents or len({len(of_agent) for of_agent in labels}) > 1:
        raise ValueError(f"labels are not one list of the same length for each of {agents} agents")
    if not all(0 <= n < HUGE for of_agent in labels for n in of_agent):
        raise ValueError("labels are not numbers of records")
    return labels


def _rows(text: str, edges: int) -> list[Fields]:
    rows: list[Fields] = []
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            row = _row(_json(line), edges)
            if rows and row["round"] <= rows[-1]["round"]:
                raise ValueError(f"round {row['round']} comes after round {rows[-1]['round']}")
            rows.append(row)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            if number == len(lines) and not line.endswith("\n"):
                break  # a run that was cut while it wrote its last row
            raise ValueError(f"line {number}: {error}") from error
    if not rows:
        raise ValueError("no round has ended yet")
    return rows


def _row(row: Fields, edges: int) -> Fields:
    shapley = row.get("shapley") or {"phi": [], "share": []}
    per_edge = {name: [float(v) for v in shapley[name]] for name in ("phi", "share")}
    if any(len(values) not in (0, edges) or not all(abs(v) < HUGE for v in values) for values in per_edge.values()):
        raise ValueError(f"Shapley values are not one finite number for each of {edges} edges")
    if not 0 <= row["round"] < HUGE:
        raise ValueError(f"round cannot be {row['round']:g}")
    measured = {name: _number(row.get(name)) for name in MEASURED}
    for name, value in measured.items():
        if value is not None and (value < 0 or (value > 1 + 1e-6 and name.startswith("accuracy"))):
            raise ValueError(f"{name} cannot be {value:g}")
    return {"round": int(row["round"]), **measured, **per_edge}


def _summary(text: str) -> Fields:
    summary = _json(text)
    said = {name: str(summary.get(name) or "") for name in ("privacy", "stopped")}
    notes = [str(note) for note in summary.get("notes") or []]
    adversaries = {str(who): _number(epsilon) for who, epsilon in (summary.get("adversaries") or {}).items()}
    per_agent = [_number(value) for value in summary.get("accuracy_per_agent") or []]
    numbers = {name: _number(summary.get(name)) for name in SUMMARISED}
    return numbers | said | {"notes": notes, "adversaries": adversaries, "accuracy_per_agent": per_agent}
