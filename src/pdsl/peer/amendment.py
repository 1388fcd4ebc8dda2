"""Amendment of a plan: a signed change of its members, in a file that can be sent by mail.

An amendment names the hash of the plan or amendment before it, and the first round in which it is in force. Its own
hash covers everything except the signatures, so that members can compare it by reading it aloud before all have signed.
A signature is made with the key of the member's certificate in the plan, or in the amendments before.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, cast, get_args

import tomli_w

from pdsl.peer.identity import Identity, PeerInfo, check_name, parse_toml, read_toml
from pdsl.peer.signatures import is_signed, sign
from pdsl.utils.errors import PdslError
from pdsl.utils.types import JsonDict

FORMAT = 1
MAX_NUMBER = 999  # amendments of a plan
MAX_ROUND = 10**9
MAX_NAMES = 1000  # neighbours or signatures in an amendment
KIND = "signed amendment"  # of file
PURPOSE = "amendment"  # of the signatures
SHA256 = re.compile("[0-9a-f]{64}")
SIGNATURE = re.compile("(?:[0-9a-f]{2}){8,72}")  # DER, as hex

Change = Literal["leave", "join", "replace"]
KEYS = {"hash", "format", "plan", "number", "previous", "first_round", "change", "member", "signatures"}
OWN_KEYS: Mapping[str, set[str]] = {"leave": set(), "join": {"card", "neighbours"}, "replace": {"card"}}


@dataclass(frozen=True)
class Amendment:
    """One change: a member leaves or joins, or its card is replaced."""

    plan: str  # hash of the plan
    number: int  # 1 for the first amendment of the plan
    previous: str  # hash of the amendment before, or of the plan
    first_round: int
    change: Change
    member: str  # name
    card: PeerInfo | None = None  # new card, unless the member leaves
    neighbours: tuple[str, ...] = ()  # names, of a member that joins
    signatures: Mapping[str, str] = field(default_factory=dict)  # name of the signer → signature (hex)

    def as_dict(self) -> JsonDict:
        """All values except hash and signatures."""
        return {
            "format": FORMAT,
            "plan": self.plan,
            "number": self.number,
            "previous": self.previous,
            "first_round": self.first_round,
            "change": self.change,
            "member": self.member,
            **({"card": self.card.as_dict()} if self.card is not None else {}),
            **({"neighbours": list(self.neighbours)} if self.change == "join" else {}),
        }

    @cached_property
    def content(self) -> bytes:
        """Canonical JSON of all values except hash and signatures."""
        return json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":")).encode()

    @cached_property
    def hash(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def sign(self, own: Identity) -> "Amendment":
        """Add the signature of an organisation."""
        return replace(self, signatures={**self.signatures, own.card.name: sign(own, PURPOSE, self.content)})

    def is_signed_by(self, card: PeerInfo) -> bool:
        """Whether there is a valid signature under a card's name, made with the key of its certificate."""
        signature = self.signatures.get(card.name)
        return signature is not None and is_signed(card.certificate, PURPOSE, self.content, signature)

    def describe(self) -> str:
        """Describe the change in one line."""
        if self.change == "join":
            text = f"{self.member} joins as a neighbour of {', '.join(self.neighbours)}"
        else:
            text = f"{self.member} leaves" if self.change == "leave" else f"{self.member} has a new machine or key"
        if self.card is not None:
            text += f", at {self.card.address} with certificate {self.card.fingerprint}"
        return f"amendment {self.number}: from round {self.first_round} on, {text}"

    def to_toml(self) -> str:
        values = {"hash": self.hash, **self.as_dict(), "signatures": dict(self.signatures)}
        return tomli_w.dumps(values, multiline_strings=True)

    @classmethod
    def read(cls, path: Path) -> "Amendment":
        return cls.from_values(read_toml(path, KIND), str(path))

    @classmethod
    def parse(cls, content: bytes, where: str) -> "Amendment":
        return cls.from_values(parse_toml(content, where, KIND), where)

    @classmethod
    def from_values(cls, values: JsonDict, where: str) -> "Amendment":
        """Validate an untrusted amendment; PdslError if any part of it is invalid. Signatures are not verified here."""
        if values.get("format") != FORMAT:
            raise PdslError(
                f"{where}: amendment format {values.get('format')!r:.20}, but this version of pdsl reads format"
                f" {FORMAT}; use the same version as its author"
            )
        change = values.get("change")
        if change not in get_args(Change):
            raise PdslError(f"{where}: change={change!r:.20} is not leave, join or replace; request the file again")
        expected = KEYS | OWN_KEYS[cast(str, change)]
        if set(values) != expected:
            raise PdslError(f"{where}: it needs exactly {', '.join(sorted(expected))}; request the file again")
        _check_fields(values, where)
        card = PeerInfo.from_values(values["card"], f"{where}: card") if "card" in values else None
        made = cls(
            values["plan"],
            values["number"],
            values["previous"],
            values["first_round"],
            cast(Change, change),
            values["member"],
            card,
            tuple(values.get("neighbours", ())),
            values["signatures"],
        )
        if card is not None and card.name != made.member:
            raise PdslError(
                f"{where}: it is about {made.member}, but has a card of {card.name}; request the file again"
            )
        if values["hash"] != made.hash:
            raise PdslError(f"{where}: its hash does not match its content: changed or damaged; request the file again")
        return made


def _check_fields(values: JsonDict, where: str) -> None:
    """Raise PdslError unless all values have the right type and size."""
    for name in ("plan", "previous", "hash"):
        if not isinstance(values[name], str) or not SHA256.fullmatch(values[name]):
            raise PdslError(f"{where}: {name} is not a SHA-256; request the file again")
    for name, most in (("number", MAX_NUMBER), ("first_round", MAX_ROUND)):
        if type(values[name]) is not int or not 1 <= values[name] <= most:
            raise PdslError(f"{where}: {name}={values[name]!r:.20} is not between 1 and {most}; request the file again")
    names, signatures = values.get("neighbours", []), values["signatures"]
    if not isinstance(names, list) or not isinstance(signatures, dict) or max(len(names), len(signatures)) > MAX_NAMES:
        raise PdslError(f"{where}: neighbours or signatures are not a list and a table; request the file again")
    for name in (values["member"], *names, *signatures):
        if not isinstance(name, str):
            raise PdslError(f"{where}: {name!r:.20} is not a name; request the file again")
        check_name(name, where)
    for name, signature in signatures.items():
        if not isinstance(signature, str) or not SIGNATURE.fullmatch(signature):
            raise PdslError(f"{where}: the signature of {name} is damaged; request the file again")
