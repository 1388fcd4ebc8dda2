"""A user's mistake: what is wrong, where, and what to try, in one line. And what is nobody's: a lost process."""


class PdslError(Exception):
    """Raised for anything the user can mend; the command line prints it as one line and exits with 2."""


class ContactError(Exception):
    """Another process of the run is gone, or does not answer in time."""
