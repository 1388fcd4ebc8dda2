"""Limits on what callers may use: request rates, connections and open files."""

import time
from contextlib import suppress

MIN_FREE_FILES = 64  # descriptors left for data, logs and outgoing connections


class TokenBucket:
    """Rate limit with bursts: `rate` tokens per second, of which at most `burst` are saved up."""

    def __init__(self, rate: float, burst: float):
        self._rate, self._burst = rate, burst
        self._tokens, self._at = burst, time.monotonic()

    def take(self) -> bool:
        """Take a token, if there is one."""
        self._refill()
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def delay(self) -> float:
        """Take a token, on credit if need be. Returns the seconds until it is earned."""
        self._refill()
        self._tokens -= 1
        return max(0.0, -self._tokens / self._rate)

    def _refill(self) -> None:
        now = time.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now


def raise_file_limit() -> int | None:
    """Raise the limit on open files to the hard limit. Returns the limit; None if the system has no such limit."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft
