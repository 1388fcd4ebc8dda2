"""The one exception for a user's mistake: what is wrong, where, and what to try, in one line."""


class PdslError(Exception):
    """Raised for anything the user can mend; the command line prints it as one line and exits with 2."""
