"""Errors that the command line prints as one line."""


class PdslError(Exception):
    """A mistake the user can correct: what is wrong and what to do, in one line. Exit code 2."""


class ContactError(Exception):
    """Another process of the run has ended or did not respond in time. Exit code 1."""
