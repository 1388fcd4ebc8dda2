"""Errors that the command line prints as one line, and warnings in Python."""

import sys
import warnings
from pathlib import Path

PACKAGE = str(Path(__file__).parents[1])
EXHAUSTION = ("can't start new thread", "can't allocate memory", "failed to map segment")  # Python, torch, linker


class PdslError(Exception):
    """A mistake the user can correct: what is wrong and what to do, in one line. Exit code 2."""


class PrivacyWarning(UserWarning):
    """A caveat of a run's privacy statement: seeded noise, or own records that become public."""


class ContactError(Exception):
    """Another process of the run has ended or did not respond in time. Exit code 1."""


def is_exhaustion(error: Exception) -> bool:
    """Whether an error means that the machine, or a limit of this process, has no more memory or threads."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in EXHAUSTION)


def first_line(error: Exception) -> str:
    """First line of an error's text, or its type."""
    return str(error).partition("\n")[0][:200] or type(error).__name__


def warn_user(text: str) -> None:
    """Warn at the line of the user's code that called the package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
