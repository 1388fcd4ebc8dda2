"""Description of a running peer for its neighbours (`/about`): version, plan, round and clock.

The request is the same in all versions, and only `protocol` and `pdsl` of the answer have a fixed meaning. Two versions
that do not understand each other otherwise can thus name the difference. Asking changes nothing at the callee.
"""

import json
import re
import time
from dataclasses import dataclass

from pdsl import __version__
from pdsl.peer.messages import HASH, MAX_CONTROL, MAX_ROUND, NO_RECEIPT, PROTOCOL, Receipt, RefusedError

PATH = "/about"
VERSION = re.compile(r"[A-Za-z0-9.+!_-]{1,40}")


@dataclass(frozen=True)
class About:
    """Answer to `/about`. With another protocol, only `protocol` and `pdsl` are known."""

    protocol: int
    pdsl: str  # version
    plan: str = ""  # hash
    round: int = 0  # 0 before the first
    time: float = 0.0  # its clock, in seconds since 1970
    reaches_you: bool = False  # its calls to the caller are answered
    served: Receipt = NO_RECEIPT  # by the caller

    def encode(self) -> bytes:
        return json.dumps(vars(self)).encode()

    @classmethod
    def decode(cls, content: bytes) -> "About":
        """Decode an answer of any version; RefusedError if it is invalid."""
        try:
            values = json.loads(content[: MAX_CONTROL + 1])
            protocol, version = values["protocol"], values["pdsl"]
            if type(protocol) is not int or not 0 <= protocol <= MAX_ROUND or not VERSION.fullmatch(version):
                raise RefusedError("header")
            if protocol != PROTOCOL:
                return cls(protocol, version)
            t, charges, proof = values["served"]
            at, plan = values["round"], values["plan"]
            if not all(type(number) is int and 0 <= number <= MAX_ROUND for number in (at, t, charges)):
                raise RefusedError("round")
            if not HASH.fullmatch(plan) or (proof and not HASH.fullmatch(proof)):
                raise RefusedError("plan")
            reaches = values["reaches_you"] is True
            return cls(protocol, version, plan, at, float(values["time"]), reaches, Receipt(t, charges, proof))
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            raise RefusedError("header") from None


def describe(plan: str, at: int, reaches_caller: bool, served: Receipt) -> About:
    """Description of this process for a caller."""
    return About(PROTOCOL, __version__, plan, at, round(time.time(), 3), reaches_caller, served)
