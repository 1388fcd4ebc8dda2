"""What all cells need: looked at before the first of them is run."""

from collections.abc import Iterable

from pdsl.data import data_root, status
from pdsl.errors import PdslError


def check_data(names: Iterable[str]) -> None:
    """Refuse public data sets that are not here."""
    wanted = set(names)
    for name, present, where in status(data_root()):
        if name in wanted and not present:
            raise PdslError(f"{name} is not in {where}; run 'pdsl data fetch {name}', or set PDSL_DATA")
