"""What crosses the wire, and every check that it goes through before anything is used.

A message is a safetensors file: one float32 vector, and in its metadata the plan's hash, the round, the phase and the
two agents. The receiver knows all of that beforehand, so a message is right in every byte of its header or refused, and
a refusal has a name. A request and an answer without a vector are small JSON objects. Nothing is ever unpickled.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

HEADER = 1024  # most bytes of a message's header, and
SMALL = 1024  # of a request or an answer
LARGEST = 1e6  # no number of a model or a gradient comes near; more would only drive a neighbour to overflow
MODEL = -1  # the phase of a model that is given to one who comes back, outside the rounds' own phases
MOST_ROUND = 10**9
HASH = re.compile(r"[0-9a-f]{64}")


class RefusedError(Exception):
    """Something from outside that is not used; `reason` is one word or two, and never quotes the content."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Header:
    """Which message it is."""

    plan: str  # hash
    round: int
    phase: int  # the how-manieth exchange of the round
    sender: int
    receiver: int

    def as_metadata(self) -> dict[str, str]:
        return {name: str(value) for name, value in vars(self).items()}


def encode(header: Header, v: Tensor) -> bytes:  # v [d]
    return save({"v": v.detach().to("cpu", torch.float32).contiguous()}, metadata=header.as_metadata())


def message_bytes(d: int) -> int:
    """More than any message of d numbers has."""
    return 8 + HEADER + 4 * d


def decode(content: bytes, expected: Header, d: int) -> Tensor:  # [d]
    """The vector of the message that is expected, or RefusedError."""
    if not 8 <= len(content) <= message_bytes(d):
        raise RefusedError("size")
    size = int.from_bytes(content[:8], "little")
    if size > min(HEADER, len(content) - 8):
        raise RefusedError("header")
    described = _json(content[8 : 8 + size])
    if set(described) != {"__metadata__", "v"} or not isinstance(described["v"], dict):
        raise RefusedError("header")
    metadata, v = described["__metadata__"], described["v"]
    if not isinstance(metadata, dict):
        raise RefusedError("header")
    for name, value in expected.as_metadata().items():
        if metadata.get(name) != value:
            raise RefusedError(name)
    if len(metadata) != len(expected.as_metadata()) or set(v) != {"dtype", "shape", "data_offsets"}:
        raise RefusedError("header")
    if v["dtype"] != "F32":
        raise RefusedError("dtype")
    if v["shape"] != [d]:
        raise RefusedError("shape")
    if v["data_offsets"] != [0, 4 * d] or len(content) != 8 + size + 4 * d:
        raise RefusedError("size")
    vector = torch.from_numpy(np.frombuffer(content, dtype="<f4", offset=8 + size).astype(np.float32))
    if not torch.isfinite(vector).all():
        raise RefusedError("not finite")
    if vector.abs().max() > LARGEST:
        raise RefusedError("too large")
    return vector


@dataclass(frozen=True)
class Request:
    """Asks for the message of a phase, or whether the other is there for a round."""

    plan: str
    round: int
    phase: int

    def encode(self) -> bytes:
        return json.dumps(vars(self)).encode()

    @classmethod
    def decode(cls, content: bytes, plan: str) -> "Request":
        values = _small(content, {"plan", "round", "phase"})
        _check_plan(values, plan)
        return cls(plan, _whole(values, "round", 0, MOST_ROUND), _whole(values, "phase", MODEL, MOST_ROUND))


STATES = ("here", "wait", "out", "ahead", "left", "finished")


@dataclass(frozen=True)
class Answer:
    """What a peer says about itself instead of a message.

    here: I count on you in this round. wait: I have not got there yet. out: this round goes on without you.
    ahead: that round is over for me. left: and I went on without you. finished: all are.
    """

    plan: str
    state: str
    round: int  # where the peer is: the round it runs, or for which it looks who is there
    gathering: bool  # the latter: whoever comes for this round is in it
    waiting: bool  # for somebody, so that its lateness is not its own
    held: bool  # somebody of whom nothing is heard

    def encode(self) -> bytes:
        return json.dumps(vars(self)).encode()

    @classmethod
    def decode(cls, content: bytes, plan: str) -> "Answer":
        flags = ("gathering", "waiting", "held")
        values = _small(content, {"plan", "state", "round", *flags})
        _check_plan(values, plan)
        if values["state"] not in STATES or not all(isinstance(values[name], bool) for name in flags):
            raise RefusedError("state")
        at = _whole(values, "round", 0, MOST_ROUND)
        return cls(plan, values["state"], at, *(values[name] for name in flags))


VECTOR, WORDS = b"\x01", b"\x00"  # what the rest of a response is


def split(response: bytes) -> tuple[bool, bytes]:
    """Whether it has a vector, and the rest."""
    kind, rest = response[:1], response[1:]
    if kind not in (VECTOR, WORDS):
        raise RefusedError("kind")
    return kind == VECTOR, rest


def _json(content: bytes) -> dict[str, Any]:
    try:
        values = json.loads(content.decode())
    except (ValueError, RecursionError):
        raise RefusedError("header") from None
    if not isinstance(values, dict):
        raise RefusedError("header")
    return values


def _small(content: bytes, names: set[str]) -> dict[str, Any]:
    if len(content) > SMALL:
        raise RefusedError("size")
    values = _json(content)
    if set(values) != names:
        raise RefusedError("header")
    return values


def _check_plan(values: dict[str, Any], plan: str) -> None:
    if not isinstance(values["plan"], str) or not HASH.fullmatch(values["plan"]):
        raise RefusedError("header")
    if values["plan"] != plan:
        raise RefusedError("plan")


def _whole(values: dict[str, Any], name: str, least: int, most: int) -> int:
    value = values[name]
    if type(value) is not int or not least <= value <= most:
        raise RefusedError(name)
    return value
