"""The public set alone, for the tasks of the tables: the same model and recipe, kept with its settings."""

import json
from pathlib import Path
from statistics import fmean

from pdsl.reproduce.cells import SweepPlan, job_of
from pdsl.reproduce.paper import AGENTS, EPSILONS, GRAPHS, Setting
from pdsl.sweep.job import Job
from pdsl.training.baselines import compute_baselines
from pdsl.training.experiment import prepare
from pdsl.utils.files import write_whole

FILE = "public.json"
METHOD = "dp-dpsgd"  # any: the public set alone depends on data and model only


def public_alone(plan: SweepPlan, table: str, folders: list[Path], compute: bool = True) -> float | None:
    """Test accuracy of the model trained on the public set alone, mean over the public sets of the seeds.

    It is read from the first folder that has it, or computed, and written to all of them. None if it is not known and
    not to be computed.
    """
    names = {job.name: job for job in (_job(plan, table, seed) for seed in _seeds(plan, table))}
    known: dict[str, float] = {}
    for folder in reversed(folders):
        known |= _read(folder)
    for name, job in names.items():
        if name not in known:
            if not compute:
                return None
            score = compute_baselines(prepare(job.config.model_copy(update={"baselines": "public"})))["public"]
            if score is None:
                return None
            known[name] = round(score, 5)
    for folder in folders:
        stored = _read(folder) | {name: known[name] for name in names}
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / FILE, json.dumps(stored, indent=1).encode())
    return fmean(known[name] for name in names)


def _job(plan: SweepPlan, table: str, seed: int) -> Job:
    setting = Setting(table, EPSILONS[table][0], METHOD, GRAPHS[0], AGENTS[0])
    return job_of(plan.task, setting, plan.task.rates_of(table)[0], seed)


def _seeds(plan: SweepPlan, table: str) -> tuple[int, ...]:
    """One seed if all share the public set."""
    shared = _job(plan, table, 0).config.data.public_seed is not None
    return plan.seeds[:1] if shared else plan.seeds


def _read(folder: Path) -> dict[str, float]:
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return {str(name): float(value) for name, value in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
