"""Run many jobs at once, and none twice.

Several schedulers may share one folder, on one machine or several: a job is run by the process that holds its lock, and
the others wait for its score.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

from pdsl.sweep.job import Job, Score, load_score, record_failure, run_job

Scores = Mapping[str, Score]  # by the name of the job
Wanted = Callable[[Scores], Sequence[Job]]  # jobs known to be needed, given the scores so far
OnScore = Callable[[Score, int, bool], None]  # a score, the number of scores so far, whether it was computed just now
Known = Callable[[Job], Score | None]
PAUSE = 1.0  # seconds between two looks at jobs that other processes run
MAX_TRIES = 2  # of a job whose process is killed
KILLED = "its process was killed; is there enough memory?"


def run_jobs(
    wanted: Wanted, folder: Path, on_score: OnScore, processes: int | None = None, known: Known | None = None
) -> dict[str, Score]:
    """Scores of all jobs that `wanted` returns; it is called again whenever a job has ended.

    `known`: the score of a job that need not be run, or None.
    """
    known = known or (lambda job: None)
    scores: dict[str, Score] = {}
    running: dict[Future[Score | None], tuple[Job, ProcessPoolExecutor]] = {}
    elsewhere: set[str] = set()  # names of jobs that another process runs
    killed: Counter[str] = Counter()

    def add(score: Score, new: bool) -> None:
        scores[score.name] = score
        on_score(score, len(scores), new)

    def open_jobs() -> list[Job]:
        """Jobs that are neither finished nor running here. Scores found on disk are added."""
        while True:
            busy = {*scores, *(job.name for job, _ in running.values())}
            left = list({job.name: job for job in wanted(scores) if job.name not in busy}.values())
            found = [score for job in left if (score := load_score(job, folder) or known(job)) is not None]
            for score in found:
                add(score, False)
            if not found:
                return left

    with _pools(processes) as pools:
        while (left := open_jobs()) or running:
            ours = [job for job in left if job.name not in elsewhere]
            busy = [pool for _, pool in running.values()]
            for pool, job in zip([p for p in pools if p not in busy], ours, strict=False):
                try:
                    running[pool.submit(run_job, job, folder)] = job, pool
                except BrokenProcessPool:  # killed while idle
                    pools[pools.index(pool)] = _pool()
            if not running:  # other processes have all that is left: look again whether they still do
                time.sleep(PAUSE)
                elsewhere.clear()
                continue
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job, pool = running.pop(future)
                try:
                    score = future.result()
                except BrokenProcessPool:
                    pools[pools.index(pool)] = _pool()
                    killed[job.name] += 1
                    if killed[job.name] == MAX_TRIES:
                        add(record_failure(job.name, folder, KILLED), True)
                    continue
                if score is None:
                    elsewhere.add(job.name)
                else:
                    add(score, True)
    return scores


@contextmanager
def _pools(processes: int | None) -> Iterator[list[ProcessPoolExecutor]]:
    """Processes of one thread each; terminated at once on an interruption, because every run can be resumed."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    pools = [_pool() for _ in range(processes or os.cpu_count() or 1)]
    try:
        yield pools
    except BaseException:
        running = [process for pool in pools for process in (getattr(pool, "_processes", None) or {}).values()]
        for pool in pools:  # after the list: a pool that is shut down has no processes
            pool.shutdown(wait=False, cancel_futures=True)
        for process in running:
            process.terminate()
        raise
    for pool in pools:
        pool.shutdown(wait=False)
    for pool in pools:
        pool.shutdown()


def _pool() -> ProcessPoolExecutor:
    """A pool of one process: if it is killed, only its own job is lost."""
    return ProcessPoolExecutor(1, get_context("spawn"), initializer=_exit_with, initargs=(os.getpid(),))


def _exit_with(parent: int) -> None:
    """Exit when the parent is killed, so that no process keeps writing to a run that is resumed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
