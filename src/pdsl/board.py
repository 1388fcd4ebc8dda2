"""TensorBoard: a run's rows as scalars, while it goes on."""

from pathlib import Path
from typing import Any

from pdsl.errors import PdslError
from pdsl.places import check_folder

SCALARS = (
    *("accuracy", "accuracy_min", "accuracy_max", "accuracy_of_mean"),
    *("loss", "loss_min", "loss_max", "epsilon", "consensus", "bytes"),
)


class Board:
    """An event file in a folder, with a point for everything that a row has measured; made with the first row."""

    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise PdslError(
                "--tensorboard needs a package; install it with: pip install 'pdsl[tensorboard]'"
            ) from error
        check_folder(folder, "--tensorboard")
        self._make = SummaryWriter
        self._folder = folder
        self._writer: Any = None

    def row(self, row: dict[str, Any]) -> None:
        if self._writer is None:  # the first row of a run taken up again takes the place of what came after it
            self._writer = self._make(str(self._folder), purge_step=row["round"])
        for name in SCALARS:
            if row.get(name) is not None:
                self._writer.add_scalar(name, row[name], row["round"])
        self._writer.flush()
