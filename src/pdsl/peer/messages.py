"""Wire format of messages, requests and answers, and the checks before any of them is used.

A message is a safetensors file with one float32 vector. Its metadata has the plan's hash, the round, the phase, the
sender and the receiver. The receiver expects exact values for all of them, so a message with any other header is
refused with a named reason. Requests, and answers without a vector, are small JSON objects. Nothing is unpickled.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from pdsl.utils.types import JsonDict

PROTOCOL = 2  # changes with the wire format, and with the exchanges of any algorithm
MAX_HEADER = 1024  # bytes of a message's header
MAX_CONTROL = 1024  # bytes of a request or an answer
MAX_VALUE = 1e6  # absolute value of a number in a message, far above honest ones; larger ones could cause overflow
MODEL_PHASE = -1  # phase of a model for a returning neighbour, outside the phases of a round
MAX_ROUND = 10**9
MAX_CHARGES = 2**32
HASH = re.compile(r"[0-9a-f]{64}")
PROOF_BYTES = 40  # a receipt: the round and the number of charges in 4 bytes each, and their proof

PlanCheck = str | Callable[[str, int], bool]  # a plan's hash, or whether a hash is valid in a round (0: in any)


class RefusedError(Exception):
    """Invalid input from the network. `reason` is one or two words and never quotes the content."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Header:
    """Identification of a message."""

    plan: str  # hash
    round: int
    phase: int  # index of the exchange within the round
    sender: int
    receiver: int

    def as_metadata(self) -> dict[str, str]:
        return {name: str(value) for name, value in vars(self).items()}


def encode(header: Header, v: Tensor) -> bytes:  # v [d]
    return save({"v": v.detach().to("cpu", torch.float32).contiguous()}, metadata=header.as_metadata())


def max_message_bytes(d: int) -> int:
    """Upper bound on the size of a message of d numbers."""
    return 8 + MAX_HEADER + 4 * d


def decode(content: bytes, expected: Header, d: int) -> Tensor:  # [d]
    """Decode the vector of an expected message; RefusedError for any other content."""
    if not 8 <= len(content) <= max_message_bytes(d):
        raise RefusedError("size")
    size = int.from_bytes(content[:8], "little")
    if size > min(MAX_HEADER, len(content) - 8):
        raise RefusedError("header")
    parsed = _parse_json(content[8 : 8 + size])
    if set(parsed) != {"__metadata__", "v"} or not isinstance(parsed["v"], dict):
        raise RefusedError("header")
    metadata, v = parsed["__metadata__"], parsed["v"]
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
    if vector.abs().max() > MAX_VALUE:
        raise RefusedError("too large")
    return vector


class Receipt(NamedTuple):
    """Last round in which a peer has sent noisy vectors, and the charges in its ledger then; see `receipts`."""

    round: int = 0
    charges: int = 0
    proof: str = ""  # hex, for one neighbour


NO_RECEIPT = Receipt()


@dataclass(frozen=True)
class Request:
    """Request for the message of a phase, or for a neighbour's state in a round."""

    plan: str
    round: int
    phase: int
    served: Receipt = NO_RECEIPT  # by the callee

    def encode(self) -> bytes:
        return json.dumps({"protocol": PROTOCOL, **vars(self)}).encode()

    @classmethod
    def decode(cls, content: bytes, plan: PlanCheck, last: int = MAX_ROUND) -> "Request":
        """Decode a request; `last`: the plan's last round."""
        values = _parse_control(content, {"plan", "round", "phase", "served"})
        at = _check_integer(values, "round", 0, last + 1)
        _check_plan(values, plan, at)
        return cls(values["plan"], at, _check_integer(values, "phase", MODEL_PHASE), _check_receipt(values, last))


@dataclass(frozen=True)
class RelayRequest:
    """Request to a relay for a connection with another member."""

    plan: str
    peer: int

    def encode(self) -> bytes:
        return json.dumps({"protocol": PROTOCOL, **vars(self)}).encode()

    @classmethod
    def decode(cls, content: bytes, plan: PlanCheck) -> "RelayRequest":
        values = _parse_control(content, {"plan", "peer"})
        _check_plan(values, plan)
        return cls(values["plan"], _check_integer(values, "peer", 0))


STATES = ("here", "wait", "unreached", "out", "ahead", "left", "finished")


@dataclass(frozen=True)
class Answer:
    """State of a peer, sent in reply to a request when there is no message.

    here       the caller takes part in this round
    wait       the peer has not reached this round yet
    unreached  the peer has reached this round, but its calls to the caller fail
    out        the peer runs this round without the caller
    ahead      the peer has completed this round
    left       the peer has completed this round and no longer waits for the caller
    finished   the peer has completed all rounds
    """

    plan: str
    state: str
    round: int  # current round of the peer
    gathering: bool  # the roll call of that round is open: a caller for this round is admitted
    waiting: bool  # the peer waits for a neighbour, so that its delay is not its own fault
    held: bool  # the peer is blocked: the neighbour it waits for is silent
    served: Receipt = NO_RECEIPT  # by the caller

    def encode(self) -> bytes:
        return json.dumps({"protocol": PROTOCOL, **vars(self)}).encode()

    @classmethod
    def decode(cls, content: bytes, plan: PlanCheck, last: int = MAX_ROUND) -> "Answer":
        """Decode an answer; `last`: the plan's last round."""
        flags = ("gathering", "waiting", "held")
        values = _parse_control(content, {"plan", "state", "round", "served", *flags})
        _check_plan(values, plan)
        if values["state"] not in STATES or not all(isinstance(values[name], bool) for name in flags):
            raise RefusedError("state")
        at, receipt = _check_integer(values, "round", 0, last + 1), _check_receipt(values, last)
        gathering, waiting, held = (values[name] for name in flags)
        return cls(values["plan"], values["state"], at, gathering, waiting, held, receipt)


VECTOR, ANSWER = b"\x01", b"\x00"  # first byte of a response: a message or an Answer follows


def split(response: bytes) -> tuple[bool, bytes]:
    """Split a response: whether it is a message, and the content."""
    kind, rest = response[:1], response[1:]
    if kind not in (VECTOR, ANSWER):
        raise RefusedError("kind")
    return kind == VECTOR, rest


def split_proof(content: bytes) -> tuple[Receipt, bytes]:
    """Split the content of a message: the sender's receipt, and the safetensors file."""
    head, rest = content[:PROOF_BYTES], content[PROOF_BYTES:]
    return Receipt(int.from_bytes(head[:4], "big"), int.from_bytes(head[4:8], "big"), head[8:].hex()), rest


def _parse_json(content: bytes) -> JsonDict:
    try:
        values = json.loads(content.decode())
    except (ValueError, RecursionError):
        raise RefusedError("header") from None
    if not isinstance(values, dict):
        raise RefusedError("header")
    return values


def _parse_control(content: bytes, names: set[str]) -> JsonDict:
    if len(content) > MAX_CONTROL:
        raise RefusedError("size")
    values = _parse_json(content)
    if (protocol := values.pop("protocol", None)) != PROTOCOL or type(protocol) is not int:
        raise RefusedError(_describe_protocol(protocol))
    if set(values) != names:
        raise RefusedError("header")
    return values


def _describe_protocol(found: object) -> str:
    """Reason to refuse another version of the wire format. Both ends log or display it."""
    if type(found) is not int or not 0 <= found <= MAX_ROUND:
        return "protocol"
    return f"protocol {found} instead of {PROTOCOL}"


def _check_plan(values: JsonDict, plan: PlanCheck, t: int = 0) -> None:
    digest = values["plan"]
    if not isinstance(digest, str) or not HASH.fullmatch(digest):
        raise RefusedError("header")
    if not (digest == plan if isinstance(plan, str) else plan(digest, t)):
        raise RefusedError("plan")


def _check_integer(values: JsonDict, name: str, least: int, most: int = MAX_ROUND) -> int:
    value = values[name]
    if type(value) is not int or not least <= value <= most:
        raise RefusedError(name)
    return value


def _check_receipt(values: JsonDict, last: int) -> Receipt:
    match values["served"]:
        case [int(t), int(charges), str(proof)] if type(t) is type(charges) is int and (
            0 <= t <= last and 0 <= charges < MAX_CHARGES and (not proof or HASH.fullmatch(proof))
        ):
            return Receipt(t, charges, proof)
    raise RefusedError("served")
