"""A pool of single-threaded workers: both cores busy, one torch thread each.

Two threads inside every torch call on top of two workers is 10 to 40 times slower than one each. Work is cut the same
way for any number of workers, so that the results do not depend on it.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypeVar

import torch

A = TypeVar("A")
B = TypeVar("B")


def _cores() -> int:
    """Cores for this process: what is here, shared with the other ranks that were started here."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, here // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


class Workers:
    """Runs a function over items on `count` threads; a context manager that gives torch its threads back."""

    def __init__(self, count: int | None = None):
        self.count = count or _cores()
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(1)
        self._pool = ThreadPoolExecutor(self.count, initializer=torch.set_num_threads, initargs=(1,))

    def map(self, function: Callable[[A], B], items: Iterable[A]) -> list[B]:
        """function of each item, in order."""
        if self.count == 1:
            return [function(item) for item in items]
        return list(self._pool.map(function, items))

    @contextmanager
    def resting(self) -> Iterator[None]:
        """While others have their turn, torch's threads are theirs."""
        torch.set_num_threads(self._threads_before)
        try:
            yield
        finally:
            self._threads_before = torch.get_num_threads()
            torch.set_num_threads(1)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._threads_before)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self.close()
