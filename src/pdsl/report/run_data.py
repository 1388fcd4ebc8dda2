"""Read and validate a run directory."""

import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from pdsl.report.metric import Metric
from pdsl.report.reading import CONTRIBUTIONS, read_account, read_file
from pdsl.report.run_schema import (
    Fields,
    Metrics,
    Round,
    Setup,
    Summary,
    Task,
    parse_labels,
    parse_rounds,
    parse_setup,
    parse_summary,
)
from pdsl.settings import PrivacySettings, ShapleySettings
from pdsl.shapley.account import Account
from pdsl.utils.errors import PdslError

OWNER = "owner.json"  # in a run directory: exact counts of records


@dataclass(frozen=True)
class Run:
    name: str
    config: Fields
    setup: Setup
    rounds: list[Round]  # at least one
    summary: Summary | None  # None: the run is unfinished
    labels: list[list[int]]  # records of each class of each agent; [] if the reader may not see them
    account: Account | None = None  # contributions of the parties, if they were measured

    @property
    def algorithm(self) -> str:
        return str(self.config.get("algorithm", {}).get("name", "—"))

    @property
    def task(self) -> Task:
        return self.setup.task

    @property
    def metric(self) -> Metric:
        """The headline metric."""
        return self.setup.task.metric

    @property
    def budget(self) -> float | None:
        """The total ε the run may spend; None if no total was set."""
        return PrivacySettings(**self.config.get("privacy", {})).budget

    @property
    def private(self) -> bool:
        """Whether the noise came from the operating system, so that the records are private."""
        return is_private(self.config)

    @property
    def seeded(self) -> bool:
        """Whether the noise came from the seed, so that ε protects nobody."""
        privacy = PrivacySettings(**self.config.get("privacy", {}))
        return privacy.randomness == "seeded" and privacy.mode != "none"

    @property
    def value_function(self) -> str:
        """The `algorithm.shapley.value` setting."""
        return _shapley(self.config).value

    def outcome(self) -> Metrics:
        """Final metrics or, for an unfinished run, those of the last evaluated round."""
        if self.summary:
            return self.summary.metrics
        evaluated = (r.metrics for r in reversed(self.rounds) if r.metrics[self.metric.name] is not None)
        return next(evaluated, self.rounds[-1].metrics)

    def headline(self, suffix: str = "") -> float | None:
        """The headline metric of `outcome`; `suffix` _of_mean: that of the mean model."""
        return self.outcome()[f"{self.metric.name}{suffix}"]

    def agents_outcome(self) -> list[float | None]:
        """The headline metric of each agent at the end, or in the last evaluated round; [] if unknown."""
        if self.summary and self.summary.per_agent:
            return self.summary.per_agent
        return next((r.per_agent for r in reversed(self.rounds) if r.per_agent), [])

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
    config = read_file(run / "config.toml", _config)
    setup = read_file(run / "setup.json", parse_setup)
    # The summary is read before the rows: once it exists, all rows of a live run have been written.
    ended = (run / "summary.json").exists()
    summary = read_file(run / "summary.json", lambda text: parse_summary(text, setup)) if ended else None
    rounds = read_file(run / "rows.jsonl", lambda text: parse_rounds(text, setup))
    counts = (owner or not is_private(config)) and (run / OWNER).exists()  # a shared directory may lack the file
    labels = read_file(run / OWNER, lambda text: parse_labels(text, setup.agents)) if counts else []
    name = str(config.get("name") or run.resolve().name)
    return Run(name, config, setup, rounds, summary, labels, _account(run, setup) if ended else None)


def _account(run: Path, setup: Setup) -> Account | None:
    """The account of a finished run, if its parties are agents of the run."""
    account = read_account(run)
    if account and not set(account.names) <= {setup.agent_names.name(i) for i in range(setup.agents)}:
        file = str(run / CONTRIBUTIONS)
        raise PdslError(f"{file!r} names parties that are not agents of the run; put back the file of this run")
    return account


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
