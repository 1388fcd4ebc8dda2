"""Run what a plan asks for, cells side by side, and what was done before not again."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

from pdsl.compare.cells import Score, finished, run_cell
from pdsl.compare.plan import Cell, Plan
from pdsl.errors import PdslError

PLAN = "plan.json"
Told = Callable[[Score, int, int], None]  # a score, how many there are, how many there will be


def carry_out(plan: Plan, folder: Path, told: Told, processes: int | None = None) -> list[Score]:
    """All scores: every algorithm's trials, then its finals at the learning rate that did best in them."""
    _claim(plan, folder)
    scores: dict[Cell, Score] = {}

    def note(score: Score) -> None:
        scores[score.cell] = score
        told(score, len(scores), plan.total)

    with _pool(processes) as pool:

        def run(cells: list[Cell]) -> None:
            new = [cell for cell in cells if cell not in scores]
            done = {cell: finished(cell, folder / cell.name) for cell in new}
            for score in done.values():
                if score is not None:
                    note(score)
            missing = [cell for cell, score in done.items() if score is None]
            for future in as_completed([pool.submit(run_cell, plan, cell, folder) for cell in missing]):
                note(future.result())

        run(_trials(plan))
        run(_finals(plan, scores))
    return list(scores.values())


def _trials(plan: Plan) -> list[Cell]:
    return [cell for name in plan.algorithms for cell in plan.trials(name)]


def _finals(plan: Plan, scores: dict[Cell, Score]) -> list[Cell]:
    chosen = ((name, best_rate(plan, name, scores)) for name in plan.algorithms)
    return [cell for name, rate in chosen if rate is not None for cell in plan.finals(name, rate)]


def best_rate(plan: Plan, algorithm: str, scores: dict[Cell, Score]) -> float | None:
    """The learning rate with the best accuracy on the public set; the smallest of equals, None if all trials failed."""
    trials = [scores[cell] for cell in plan.trials(algorithm) if scores[cell].failed is None]
    return max(trials, key=lambda score: score.on_public).cell.learning_rate if trials else None


@contextmanager
def _pool(processes: int | None) -> Iterator[ProcessPoolExecutor]:
    """Processes of one thread each; left at once when interrupted, since every run can be taken up."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    count = processes or os.cpu_count() or 1
    pool = ProcessPoolExecutor(count, get_context("spawn"), initializer=_end_with, initargs=(os.getpid(),))
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(getattr(pool, "_processes", {}).values()):
            process.terminate()
        raise
    pool.shutdown()


def _end_with(parent: int) -> None:
    """A process whose parent was killed ends too, so that nobody holds on to a run that is taken up again."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _claim(plan: Plan, folder: Path) -> None:
    """The folder is this plan's, or new."""
    file = folder / PLAN
    if file.exists():
        try:
            stored = Plan.from_dict(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError) as e:
            raise PdslError(f"{file}: damaged: {e}; remove the folder, or choose another --out") from e
        if stored.key != plan.key:
            raise PdslError(f"{folder} holds another comparison; choose another --out")
        return
    if folder.exists() and any(folder.iterdir()):
        raise PdslError(f"{folder} is not empty; choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f"{PLAN}.part"
        aside.write_text(json.dumps(plan.as_dict(), indent=1), encoding="utf-8")
        aside.replace(file)
    except OSError as e:
        raise PdslError(f"cannot write to {folder}: {e.strerror}; choose another --out") from e
