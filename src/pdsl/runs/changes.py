"""Settings in which a config differs from the run in a directory."""

from collections.abc import Iterator

from pdsl.config import Config
from pdsl.data.datasets import LOADERS
from pdsl.runs.directory import RunDirectory
from pdsl.section import flat


def differing_setting(config: Config, run: RunDirectory) -> str | None:
    """The first setting in which the run in the directory differs; None if it is the same run."""
    return next((name for name, _, _ in changed_settings(config, run)), None)


def changed_settings(config: Config, run: RunDirectory) -> Iterator[tuple[str, object, object]]:
    """(name, value in the directory, value in the config) of each setting that differs; None: not set."""
    ours, stored = flat(config.resolve().as_dict()), flat(run.config())
    if ours["task.kind"] == "auto":  # the directory has the kind that was inferred from the data
        ours["task.kind"] = stored.get("task.kind")
    if "agents" not in config.graph.model_fields_set and config.data.name not in LOADERS:  # the owners of the data
        ours["graph.agents"] = stored.get("graph.agents")
    given = run.given()  # settings that were chosen for the run, as they were given
    for name in sorted((ours.keys() | stored.keys()) - {"baselines"}):  # they change no round
        if ours.get(name) not in (stored.get(name), given.get(name, stored.get(name))):
            yield name, stored.get(name), ours.get(name)
