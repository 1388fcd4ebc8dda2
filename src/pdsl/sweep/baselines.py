"""Baselines of a comparison: computed once per seed for all algorithms, and kept in its folder."""

import json
from pathlib import Path
from statistics import fmean

from pdsl.config import validate
from pdsl.sweep.comparison import ComparisonPlan
from pdsl.training.baselines import Baselines, compute_baselines
from pdsl.training.experiment import prepare
from pdsl.utils.files import write_whole
from pdsl.utils.types import JsonDict

FILE = "baselines.json"
REFERENCE = "d-psgd"  # its messages, one per round, are those that the noise of the baselines is for


def load_or_compute(plan: ComparisonPlan, folder: Path) -> Baselines:
    """Headline metric of each baseline, mean over the seeds; None if a baseline diverged for a seed."""
    stored = _read(folder / FILE)
    for seed in plan.seeds:
        if str(seed) not in stored:
            config = validate({**plan.base, "seed": seed, "algorithm": {"name": REFERENCE}}, "compare")
            stored[str(seed)] = compute_baselines(prepare(config))
            write_whole(folder / FILE, json.dumps(stored, indent=1).encode())
    of_seeds: list[Baselines] = [stored[str(seed)] for seed in plan.seeds]
    return {name: _mean([found.get(name) for found in of_seeds]) for name in of_seeds[0]}


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def _read(file: Path) -> JsonDict:
    """Baselines by seed; none if the file is missing or damaged, and it is then written anew."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}
