"""Caches of the tests, and how tests are shared out between the processes of `pytest -n`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdsl.data import datasets


@pytest.fixture(autouse=True)
def no_data_of_other_tests() -> None:
    """Read built-in data sets anew, because tests change where they are."""
    datasets._load_once.cache_clear()


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Give each process one half of the tests in a row, and let an idle process take tests from a busy one.

    Files then stay together, so that a fixture of a module is mostly made once, and no process ends long before the
    other. Without pytest-xdist, or with `--dist`, nothing changes.
    """
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "worksteal"


@pytest.fixture(autouse=True, scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty cache of public computations, so that tests find and leave nothing in the user's."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        folder = tmp_path_factory.mktemp("cache")
        monkeypatch.setenv("PDSL_CACHE", str(folder))
        yield folder
