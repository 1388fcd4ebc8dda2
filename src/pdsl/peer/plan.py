"""The plan: everything that peers must agree on before they train, in a file that people can send by mail.

Nothing in it is secret. Its hash covers all of it and goes with every message, so that a peer with another plan, be it
by a single digit, is refused. People compare the hash by reading it aloud.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import Field, ValidationError

from pdsl import graph as graphs
from pdsl.algorithms import ALGORITHMS, PDSL
from pdsl.config import Config, load, validated
from pdsl.errors import PdslError
from pdsl.graph import Graph
from pdsl.models import DEFAULT_MODEL, MODELS
from pdsl.peer.files import parse_toml, read_toml
from pdsl.peer.identity import Card
from pdsl.randomness import Streams
from pdsl.settings import RogueSettings, Section

PLAN = "plan.toml"
FORMAT = 4
MOST_MEMBERS = 1000
LOCAL = ("data", "partition", "engine")  # sections that are each organisation's own business


class Task(Section):
    """What is public about the data."""

    records: float = Field(ge=1, description="records of an average organisation: decides the sampling rate")
    shape: tuple[int, ...] = Field(min_length=1, max_length=8, description="of a record")
    classes: int = Field(ge=2, le=1_000_000)
    public: str = Field(pattern="^[0-9a-f]{64}$", description="SHA-256 of public.npz: Q and the test set")


class Conduct(Section):
    """How long to wait for whom."""

    silence: float = Field(10.0, gt=0, le=3600, description="seconds without a sign of life: out of the round")
    patience: float = Field(2.0, gt=0, le=3600, description="seconds for a neighbour that waits for a silent one")
    deadline: float = Field(120.0, gt=0, le=86400, description="seconds a live neighbour may take before it is out")
    start: float = Field(3600.0, gt=0, le=604800, description="seconds to wait for neighbours that have not come yet")
    quorum: int = Field(1, ge=1, description="neighbours that must be there for a round to begin")


@dataclass(frozen=True)
class Plan:
    """Agreed settings and who is which agent: member i is agent i."""

    config: Config
    task: Task
    conduct: Conduct
    members: tuple[Card, ...]

    def __post_init__(self) -> None:
        _check(self)

    def as_dict(self) -> dict[str, Any]:
        config = {name: value for name, value in self.config.as_dict().items() if name not in LOCAL}
        return {
            "format": FORMAT,
            "task": self.task.model_dump(mode="json"),
            "conduct": self.conduct.model_dump(mode="json"),
            "config": config,
            "member": [card.as_dict() for card in self.members],
        }

    @cached_property  # every request is compared with it
    def hash(self) -> str:
        """SHA-256 of all of it: of the values, not of how the file is written."""
        canonical = json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    @cached_property
    def graph(self) -> Graph:
        return graphs.build(self.config.graph, Streams(self.config.seed))

    def agent(self, name: str) -> int:
        """Which agent an organisation is."""
        for i, card in enumerate(self.members):
            if card.name == name:
                return i
        raise PdslError(f"the plan has no member {name}; it has: {', '.join(card.name for card in self.members)}")

    def neighbours(self, agent: int) -> list[int]:
        """Whom it talks to; itself is not among them."""
        return [int(j) for j in self.graph.neighbourhood(agent) if j != agent]

    def to_toml(self) -> str:
        return tomli_w.dumps({"hash": self.hash, **self.as_dict()}, multiline_strings=True)

    @classmethod
    def read(cls, path: Path) -> "Plan":
        return cls.checked(read_toml(path, "plan"), str(path))

    @classmethod
    def parse(cls, content: bytes, where: str) -> "Plan":
        return cls.checked(parse_toml(content, where, "plan"), where)

    @classmethod
    def checked(cls, values: dict[str, Any], where: str) -> "Plan":
        """A plan from outside; PdslError if anything in it is not as it should be, its own hash included."""
        expected = {"hash", "format", "task", "conduct", "config", "member"}
        if set(values) != expected:
            raise PdslError(f"{where}: a plan has {', '.join(sorted(expected))}, and nothing else; ask for it again")
        if values["format"] != FORMAT:
            raise PdslError(
                f"{where}: format {values['format']!r:.20}, but this version knows {FORMAT}; bring both to one"
            )
        member, config = values["member"], values["config"]
        if not isinstance(member, list) or not 2 <= len(member) <= MOST_MEMBERS or not isinstance(config, dict):
            raise PdslError(f"{where}: no list of 2 to {MOST_MEMBERS} members, or no config; ask for it again")
        if local := set(config) & set(LOCAL):
            raise PdslError(f"{where}: config.{min(local)} is not for a plan to say; ask for it again")
        algorithm = config.get("algorithm", {})
        name = algorithm.get("name", PDSL.name) if isinstance(algorithm, dict) else None
        if name not in list(ALGORITHMS):  # before anything is validated: an import path would run code
            raise PdslError(f"{where}: algorithm.name={name!r:.60} is not built in; choose {', '.join(ALGORITHMS)}")
        cards = tuple(Card.checked(values, f"{where}: member {i}") for i, values in enumerate(member))
        task, conduct = section(Task, values["task"], where), section(Conduct, values["conduct"], where)
        plan = cls(validated(config, where), task, conduct, cards)
        if plan.hash != values["hash"]:
            raise PdslError(f"{where}: its hash is not that of its content: changed or damaged; ask for it again")
        return plan


def spoken(digest: str) -> str:
    """A hash in groups, for reading aloud."""
    return " ".join(digest[i : i + 8] for i in range(0, len(digest), 8))


def compose(
    cards: Sequence[Card], config: Path | None, assignments: Sequence[str], task: Task, conduct: Conduct
) -> Plan:
    """A plan of these members and settings, but for what is each organisation's own business.

    Between organisations noise is secret, whatever the settings say of it.
    """
    given = load(config, [*assignments, f"graph.agents={len(cards)}", "privacy.randomness=system"])
    own = {section: Config.model_fields[section].get_default() for section in LOCAL}
    if given.model.name == "auto":
        own["model"] = given.model.model_copy(update={"name": DEFAULT_MODEL.get(given.data.name, "mlp")})
    return Plan(given.model_copy(update=own), task, conduct, tuple(cards))


S = TypeVar("S", bound=Section)


def section(kind: type[S], values: object, where: str) -> S:
    """A Task or a Conduct of values from outside; a mistake becomes one line."""
    try:
        return kind.model_validate(values)
    except ValidationError as e:
        first = e.errors()[0]
        key = ".".join(str(part) for part in (kind.__name__.lower(), *first["loc"]))
        raise PdslError(f"{where}: {key}: {first['msg']}; it must be another") from e


def _check(plan: Plan) -> None:
    """Refuse what cannot be agreed on by a file, or would let a plan run code or look into files."""
    config, names = plan.config, [card.name for card in plan.members]
    if len(set(names)) < len(names) or len({card.address for card in plan.members}) < len(names):
        raise PdslError("plan: two members have the same name or address; each card once")
    if len({card.certificate for card in plan.members}) < len(names):
        raise PdslError("plan: two members have the same certificate; each card once")
    if config.graph.agents != len(names):
        raise PdslError(f"plan: graph.agents={config.graph.agents}, but it has {len(names)} members")
    if config.graph.kind in ("file", "python") or config.graph.path is not None:
        raise PdslError("plan: graph.kind must be one that needs no file; choose ring, full, star and so on")
    if config.model.name not in MODELS:
        raise PdslError(f"plan: model.name={config.model.name!r:.60} is not built in; choose {', '.join(MODELS)}")
    if config.privacy.mode == "none" or config.privacy.randomness != "system":
        raise PdslError(
            "plan: between organisations noise is always on and secret; privacy.mode=sound, randomness=system"
        )
    if 0 in (config.privacy.sigma, config.privacy.noise_multiplier):
        raise PdslError("plan: privacy.sigma=0 or noise_multiplier=0 is no noise; leave it out, and σ is found")
    if config.privacy.budget is None:
        raise PdslError("plan: there is no budget at which a member would stop; set one, privacy.target_epsilon=4")
    if config.batch.sampler != "poisson":
        raise PdslError("plan: batch.sampler=fixed would tell how many records each member has; choose poisson")
    if config.rogue != RogueSettings():
        raise PdslError("plan: [rogue] is for simulations; leave it out")
    if min(plan.task.shape) < 1 or _product(plan.task.shape) > 10**8:
        raise PdslError(f"plan: task.shape={plan.task.shape} is not the shape of a record")
    most = max(len(plan.neighbours(i)) for i in range(len(names)))
    if plan.conduct.quorum > min(len(plan.neighbours(i)) for i in range(len(names))):
        raise PdslError(f"plan: conduct.quorum={plan.conduct.quorum} is more than some member has neighbours")
    config.algorithm.check(most + 1)


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
