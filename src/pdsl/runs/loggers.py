"""Loggers: listeners that write the records of a run for TensorBoard, Weights & Biases or MLflow."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pdsl.runs.listeners import RunListener
from pdsl.section import flat
from pdsl.training.experiment import Experiment
from pdsl.training.records import RoundRecord
from pdsl.utils.errors import PdslError
from pdsl.utils.files import check_folder

if TYPE_CHECKING:
    from pdsl.runs.result import Summary

UNPLOTTED = ("round", "messages", "bytes_between_processes")


def plotted(record: Mapping[str, object]) -> dict[str, float]:
    """The values of a record that are single numbers, without counters."""
    return {
        name: value
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in UNPLOTTED
    }


class TensorBoard(RunListener):
    """Scalars of every round in a TensorBoard event file, which is created with the first record."""

    def __init__(self, folder: str | PathLike[str]):
        folder = Path(folder)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise PdslError("TensorBoard needs a package; install it with: pip install tensorboard") from error
        check_folder(folder, "--tensorboard")
        self._make = SummaryWriter
        self._folder = folder
        self._writer: Any = None

    def on_start(self, experiment: Experiment, path: Path | None, records: Sequence[RoundRecord]) -> None:
        for record in records[-1:]:
            self.on_round(record)

    def on_round(self, record: RoundRecord) -> None:
        if self._writer is None:  # a resumed run replaces the points after its first record
            self._writer = self._make(str(self._folder), purge_step=record["round"])
        for name, value in plotted(record).items():
            self._writer.add_scalar(name, value, record["round"])
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandB(RunListener):
    """Settings, records and summary in a run of Weights & Biases.

    Args:
        project: name of the project.
        name: name of the run; default: chosen by wandb.
        mode: online; offline, for a later `wandb sync`; or disabled. Default: wandb's own setting.
        folder: place of wandb's files; default: the run directory, or the working directory.
    """

    def __init__(
        self,
        project: str = "pdsl",
        *,
        name: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        folder: str | PathLike[str] | None = None,
    ):
        try:
            import wandb
        except ImportError as error:
            raise PdslError("WandB needs a package; install it with: pip install wandb") from error
        self._wandb: Any = wandb
        self._project, self._name, self._mode, self._folder = project, name, mode, folder
        self._run: Any = None

    def on_start(self, experiment: Experiment, path: Path | None, records: Sequence[RoundRecord]) -> None:
        folder = self._folder or path
        self._run = self._wandb.init(
            project=self._project,
            name=self._name,
            mode=self._mode,
            dir=None if folder is None else str(folder),
            config=flat(experiment.config.as_dict()),
            reinit="create_new",
        )
        for record in records:
            self.on_round(record)

    def on_round(self, record: RoundRecord) -> None:
        self._run.log(plotted(record), step=record["round"])

    def on_end(self, summary: "Summary") -> None:
        self._run.summary.update({**plotted(summary), "privacy": summary["privacy"]})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


class MLflow(RunListener):
    """Settings, records and summary in a run of MLflow.

    Args:
        experiment: name of the experiment, created if it does not exist.
        uri: tracking server, or a folder for files; default: MLflow's own setting.
        name: name of the run; default: chosen by MLflow.
    """

    def __init__(self, experiment: str = "pdsl", *, uri: str | PathLike[str] | None = None, name: str | None = None):
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise PdslError("MLflow needs a package; install it with: pip install mlflow-skinny") from error
        given = Path(uri).absolute().as_uri() if uri is not None and "://" not in str(uri) else uri
        self._client: Any = MlflowClient(None if given is None else str(given))
        self._experiment, self._name = experiment, name
        self._run = ""

    def on_start(self, experiment: Experiment, path: Path | None, records: Sequence[RoundRecord]) -> None:
        known = self._client.get_experiment_by_name(self._experiment)
        place = self._client.create_experiment(self._experiment) if known is None else known.experiment_id
        self._run = self._client.create_run(place, run_name=self._name).info.run_id
        for name, value in flat(experiment.config.as_dict()).items():
            self._client.log_param(self._run, name, value)
        for record in records:
            self.on_round(record)

    def on_round(self, record: RoundRecord) -> None:
        for name, value in plotted(record).items():
            self._client.log_metric(self._run, name, value, step=record["round"])

    def on_end(self, summary: "Summary") -> None:
        for name, value in plotted(summary).items():
            self._client.log_metric(self._run, f"final.{name}", value)
        self._client.set_tag(self._run, "privacy", summary["privacy"])
        self._client.set_terminated(self._run)
        self._run = ""

    def close(self) -> None:
        if self._run:
            self._client.set_terminated(self._run, "KILLED")
            self._run = ""
