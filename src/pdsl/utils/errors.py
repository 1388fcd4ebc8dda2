"""Errors that the command line prints as one line, and warnings in Python."""


class PdslError(Exception):
    """A mistake the user can correct: what is wrong and what to do, in one line. Exit code 2."""


class PrivacyWarning(UserWarning):
    """A caveat of a run's privacy statement: seeded noise, or own records that become public."""


class ContactError(Exception):
    """Another process of the run has ended or did not respond in time. Exit code 1."""
