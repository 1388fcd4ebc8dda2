"""Progress of long computations, for a display that the caller installs; silent without one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Show = Callable[[str, int, int], None]  # what is computed, parts done, parts in all

_show: ContextVar[Show | None] = ContextVar("show", default=None)


@contextmanager
def show_progress(show: Show) -> Iterator[None]:
    """Send the progress of computations in this block to `show`."""
    token = _show.set(show)
    try:
        yield
    finally:
        _show.reset(token)


def report_progress(text: str, done: int, total: int) -> None:
    """Report progress to the display, if there is one."""
    show = _show.get()
    if show is not None:
        show(text, done, total)
