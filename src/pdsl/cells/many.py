"""All cells that are wanted, side by side, and what was done before not again.

Several of these may work in one folder at once, on one machine or several: each cell is run by whoever holds its lock,
and the others wait for its score.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

from pdsl.cells.one import Score, fail, finished, run_cell
from pdsl.config import Config

Scores = Mapping[str, Score]  # by the cell's name
Wanted = Callable[[Scores], Mapping[str, Config]]  # cells that are known to be needed, when so many have ended
Told = Callable[[Score, int, bool], None]  # a score, how many there are, and whether it was computed just now
PAUSE = 1.0  # seconds between looks at cells that others run
TRIES = 2  # of a cell whose process is killed
KILLED = "its process was killed; is there enough memory?"


def carry_out(wanted: Wanted, folder: Path, told: Told, processes: int | None = None) -> dict[str, Score]:
    """The scores of all cells that `wanted` names; it is asked again whenever one has ended."""
    scores: dict[str, Score] = {}
    running: dict[Future[Score | None], tuple[str, ProcessPoolExecutor]] = {}
    elsewhere: set[str] = set()  # cells that another process holds
    killed: Counter[str] = Counter()

    def note(score: Score, new: bool) -> None:
        scores[score.name] = score
        told(score, len(scores), new)

    def take_found() -> dict[str, Config]:
        """Note what has ended without us; what nobody here is at yet."""
        while True:
            busy = {*scores, *(name for name, _ in running.values())}
            left = {name: config for name, config in wanted(scores).items() if name not in busy}
            found = [score for name, config in left.items() if (score := finished(name, config, folder)) is not None]
            for score in found:
                note(score, False)
            if not found:
                return left

    with _pools(processes) as pools:
        while (left := take_found()) or running:
            ours = {name: config for name, config in left.items() if name not in elsewhere}
            busy = [pool for _, pool in running.values()]
            for pool, (name, config) in zip([p for p in pools if p not in busy], ours.items(), strict=False):
                try:
                    running[pool.submit(run_cell, name, config, folder)] = name, pool
                except BrokenProcessPool:  # killed while it had nothing to do
                    pools[pools.index(pool)] = _pool()
            if not running:  # nothing left but what others have: look whether they still do
                time.sleep(PAUSE)
                elsewhere.clear()
                continue
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                name, pool = running.pop(future)
                try:
                    score = future.result()
                except BrokenProcessPool:
                    pools[pools.index(pool)] = _pool()
                    killed[name] += 1
                    if killed[name] == TRIES:
                        note(fail(name, folder, KILLED), True)
                    continue
                if score is None:
                    elsewhere.add(name)
                else:
                    note(score, True)
    return scores


@contextmanager
def _pools(processes: int | None) -> Iterator[list[ProcessPoolExecutor]]:
    """Processes of one thread each; left at once when interrupted, since every run can be taken up."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    pools = [_pool() for _ in range(processes or os.cpu_count() or 1)]
    try:
        yield pools
    except BaseException:
        running = [process for pool in pools for process in (getattr(pool, "_processes", None) or {}).values()]
        for pool in pools:  # one that is shut down has forgotten its process
            pool.shutdown(wait=False, cancel_futures=True)
        for process in running:
            process.terminate()
        raise
    for pool in pools:
        pool.shutdown(wait=False)
    for pool in pools:
        pool.shutdown()


def _pool() -> ProcessPoolExecutor:
    """One process: if it is killed, the cell that it had is known, and no other has to be run again."""
    return ProcessPoolExecutor(1, get_context("spawn"), initializer=_end_with, initargs=(os.getpid(),))


def _end_with(parent: int) -> None:
    """A process whose parent was killed ends too, so that nobody holds on to a run that is taken up again."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
