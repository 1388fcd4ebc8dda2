"""Callbacks that look at the released models: early stopping and the best model.

Both use public records only: the test set or the public set Q. The models have noise already, so this is
post-processing and costs no privacy.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Never

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from pdsl.runs.listeners import RunListener, StopTraining
from pdsl.training.experiment import Experiment
from pdsl.training.records import RoundRecord
from pdsl.training.trainer import CompletedRound
from pdsl.utils.errors import PdslError
from pdsl.utils.files import write_whole
from pdsl.utils.types import JsonDict

BEST = "best.safetensors"
LOWER_IS_BETTER = ("loss", "rmse", "mae", "consensus")  # metrics, also with a suffix like _min or _of_mean


def stopping_round(rows: Sequence[Mapping[str, object]], rule: JsonDict) -> int | None:
    """Round after which a rule of `EarlyStopping` ends a run with these records; None if it does not."""
    best, since = math.inf, 0
    sign = -1.0 if rule["higher_is_better"] else 1.0
    for row in rows:
        if rule["monitor"] not in row:
            continue  # the round was not evaluated
        value = row[rule["monitor"]]
        cost = sign * value if isinstance(value, int | float) else math.inf  # None: not finite
        if cost < best - rule["min_delta"]:
            best, since = cost, 0
            continue
        since += 1
        if since >= rule["patience"]:
            number = row["round"]
            assert isinstance(number, int)
            return number
    return None


class EarlyStopping(RunListener):
    """End the run when a metric has stopped improving.

    Metrics are those of the rounds' records, measured on the test set. So the test metrics of a run that was stopped
    are slightly optimistic. The stop depends on released models and public records only and costs no privacy; an audit
    repeats the rule.

    Args:
        monitor: name in the records: loss, accuracy, rmse, accuracy_of_mean, or your own metric.
        patience: number of evaluations without improvement after which the run ends.
        min_delta: smallest change that counts as an improvement.
        higher_is_better: default: by the name of the metric.
    """

    def __init__(
        self,
        monitor: str = "loss",
        patience: int = 5,
        min_delta: float = 0.0,
        higher_is_better: bool | None = None,
        **unknown: Never,
    ):
        if unknown:
            raise PdslError(
                f"EarlyStopping: no argument {next(iter(unknown))}; it has monitor, patience, min_delta and"
                " higher_is_better=True or False"
            )
        if patience < 1 or not min_delta >= 0:
            raise PdslError(f"EarlyStopping: patience={patience}, min_delta={min_delta}; give at least 1 and 0")
        if higher_is_better is None:
            higher_is_better = monitor.partition("_")[0] not in LOWER_IS_BETTER
        self.rule: JsonDict = {
            "monitor": monitor,
            "patience": patience,
            "min_delta": min_delta,
            "higher_is_better": higher_is_better,
        }
        self._rows: list[RoundRecord] = []

    def on_start(self, experiment: Experiment, path: Path | None, records: Sequence[RoundRecord]) -> None:
        self._rows = list(records)
        self._decide()

    def on_round(self, record: RoundRecord) -> None:
        monitor = self.rule["monitor"]
        if "loss" in record and monitor not in record:
            known = ", ".join(name for name, value in record.items() if isinstance(value, float))
            raise PdslError(f"EarlyStopping: no metric '{monitor}' in the records; choose one of {known}")
        self._rows.append(record)
        self._decide()

    def _decide(self) -> None:
        if stopping_round(self._rows, self.rule) is not None:
            patience = self.rule["patience"]
            raise StopTraining(f"{self.rule['monitor']} has not improved in {patience} evaluations", self.rule)


class BestModel(RunListener):
    """Keep the models of the best round, chosen on the public set Q; the test set stays unused.

    With a run directory they are in best.safetensors, also after the run is resumed.

    Args:
        monitor: loss, or the headline metric of the task (accuracy, rmse), of the mean model on Q.
    """

    def __init__(self, monitor: str = "loss"):
        self.monitor = monitor
        self.round = 0  # the best round; 0: none yet
        self.score = math.nan  # its metric on Q
        self._x: Tensor | None = None
        self._experiment: Experiment | None = None
        self._file: Path | None = None

    @property
    def model(self) -> nn.Module:
        """The mean of the agents' models in the best round."""
        e, x = self._kept()
        return e.network.to_module(e.engine.mean(x), e.validation[0])

    @property
    def models(self) -> list[nn.Module]:
        """Each agent's model in the best round."""
        e, kept = self._kept()
        return [e.network.to_module(x, e.validation[0]) for x in kept]

    def on_start(self, experiment: Experiment, path: Path | None, records: Sequence[RoundRecord]) -> None:
        if self.monitor not in ("loss", experiment.task.metric):
            wanted = " or ".join(dict.fromkeys(("loss", experiment.task.metric)))
            raise PdslError(f"BestModel: no metric '{self.monitor}'; choose {wanted}")
        self._experiment, self._x, self.round, self.score = experiment, None, 0, math.nan
        self._file = None if path is None else path / BEST
        if records and self._file is not None and self._file.exists():
            try:
                with safe_open(self._file, framework="pt") as stored:
                    metadata = stored.metadata() or {}
                    self._x = stored.get_tensor("x")
                    self.round, self.score = int(metadata["round"]), float(metadata["score"])
            except (SafetensorError, OSError, KeyError, ValueError) as e:
                raise PdslError(f"{self._file} is damaged ({e}); remove it") from e

    def on_models(self, completed: CompletedRound) -> None:
        e, x = self._experiment, completed.state.x
        assert e is not None
        if completed.t % e.config.evaluate_every and completed.t != e.config.rounds:
            return
        inputs, targets = e.validation[0].to(x.device), e.validation[1].to(x.device)
        outputs = e.network.outputs(e.engine.mean(x).to(x.dtype), inputs)
        if self.monitor == "loss":
            score, better = float(e.task.losses(outputs.double(), targets).mean()), -1
        else:
            score, better = e.task.score(outputs, targets), 1 if e.task.higher_is_better else -1
        if math.isfinite(score) and (not self.round or better * score > better * self.score):
            self.round, self.score, self._x = completed.t, score, x.detach().cpu().clone()
            if self._file is not None:
                metadata = {"round": str(self.round), "score": repr(self.score), "monitor": self.monitor}
                write_whole(self._file, save({"x": self._x.contiguous()}, metadata=metadata))

    def _kept(self) -> tuple[Experiment, Tensor]:
        if self._experiment is None or self._x is None:
            raise PdslError("BestModel: no round has been run yet; pass it to pdsl.train as callbacks=[best] first")
        return self._experiment, self._x.to(torch.float32)
