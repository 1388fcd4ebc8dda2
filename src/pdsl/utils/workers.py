"""A pool of worker threads with one torch thread each.

Two workers with two torch threads each are 10 to 40 times slower than with one each. Work is split in the same way for
any number of workers, so results do not depend on it.
"""

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypeVar

import torch

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # parameters of glibc's mallopt

A = TypeVar("A")
B = TypeVar("B")


def _cores() -> int:
    """Cores for this process: the cores of this machine, divided by the ranks on it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


class Workers:
    """Pool of `count` threads; a context manager that restores torch's number of threads."""

    def __init__(self, count: int | None = None):
        self.count = count or _cores()
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(1)
        keep_freed_memory()
        self._pool = ThreadPoolExecutor(self.count, initializer=torch.set_num_threads, initargs=(1,))

    def map(self, function: Callable[[A], B], items: Iterable[A]) -> list[B]:
        """Apply `function` to each item; results in order."""
        if self.count == 1:
            return [function(item) for item in items]
        return list(self._pool.map(function, items))

    @contextmanager
    def release_threads(self) -> Iterator[None]:
        """Restore torch's number of threads while the caller's code runs."""
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
    """Make glibc keep freed memory for reuse, which saves about a tenth of a round's time.

    By default it returns every large block to the system, which clears it page by page on the next allocation.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the maximum that glibc accepts
        mallopt(M_TRIM_THRESHOLD, 512 << 20)
        mallopt(M_TOP_PAD, 16 << 20)
