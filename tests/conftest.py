"""How tests are shared out between the processes of `pytest -n`."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Give each process one half of the tests in a row, and let an idle process take tests from a busy one.

    Files then stay together, so that a fixture of a module is mostly made once, and no process ends long before the
    other. Without pytest-xdist, or with `--dist`, nothing changes.
    """
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "worksteal"
