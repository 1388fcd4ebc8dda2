"""A pool of single-threaded workers: both cores busy, one torch thread each.

Two threads inside every torch call on top of two workers is 10 to 40 times slower than one each. Work is cut the same
way for any number of workers, so that the results do not depend on it.
"""

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypeVar

import torch

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # glibc's names for what mallopt sets

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
        keep_freed_memory()
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


def keep_freed_memory() -> None:
    """Let freed blocks wait for their next use, where the C library is glibc; about a tenth of a round's time.

    By default it gives every large one back to the system, which clears it page by page when it is asked for again.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the largest that glibc takes
        mallopt(M_TRIM_THRESHOLD, 512 << 20)
        mallopt(M_TOP_PAD, 16 << 20)
