"""Where the real public data sets are, for tests that need them."""

import os
from pathlib import Path

import pytest

from pdsl.data import status


def real(name: str) -> Path:
    """The data root that has the data set: PDSL_DATA, or shared/data beside the repository; skips without one."""
    roots = [Path(os.environ["PDSL_DATA"])] if os.environ.get("PDSL_DATA") else []
    roots.append(Path(__file__).parents[3] / "shared" / "data")
    for root in roots:
        if any(found.name == name and found.present for found in status(root)):
            return root
    pytest.skip(f"real {name} is in none of {', '.join(map(str, roots))}; set PDSL_DATA to a folder that has it")
