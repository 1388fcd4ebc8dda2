"""The training plan: all settings that peers must agree on, in one file that can be sent by mail.

The plan contains no secrets. Every message carries its hash, which covers all of it, so a peer with a different plan is
rejected even if a single digit differs. Members compare the hash by reading it aloud. The hash is that of the values as
they were written, so a later version of pdsl with more settings reads the same plan with the same hash.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import tomli_w
import torch
from pydantic import Field, PositiveInt, ValidationError
from torch import Tensor

from pdsl import __version__, topology
from pdsl.algorithms import ALGORITHMS, PDSL
from pdsl.algorithms.schedule import AUTO
from pdsl.config import Config, load, validate
from pdsl.models.zoo import DEFAULT_MODEL
from pdsl.peer.identity import NO_ADDRESS, PeerInfo, parse_toml, read_toml
from pdsl.peer.model_check import check_model, needs_integers
from pdsl.peer.source_check import check_path, check_paths, check_sources, code_paths, source_sha256
from pdsl.section import Section
from pdsl.settings import AttackSettings, ModelSettings
from pdsl.tasks import MultiClass, Task, build_task
from pdsl.topology import Graph
from pdsl.utils.errors import PdslError
from pdsl.utils.files import read_file
from pdsl.utils.format import printable
from pdsl.utils.random import Streams
from pdsl.utils.types import JsonDict

FORMAT = 8
MAX_MEMBERS = 1000
MAX_RECORD_SIZE = 10**8  # numbers in a record
OPTIONAL = {"sources", "author"}  # keys that a plan may have
AUTHOR = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]{1,100}")
SHA256 = re.compile("[0-9a-f]{64}")
LOCAL = ("data", "partition", "engine")  # sections that each organisation sets for itself


class TaskDescription(Section):
    """Public facts about the data."""

    records: float = Field(ge=1, description="records of an average organisation; determines the sampling rate")
    shape: tuple[int, ...] = Field(min_length=1, max_length=8, description="shape of a record")
    targets: Literal["classes", "labels", "numbers"] = Field("classes", description="what is predicted")
    classes: int = Field(ge=0, le=1_000_000, description="number of classes or labels; 0 for numbers")
    target_shape: tuple[PositiveInt, ...] = Field((), max_length=1, description="shape of a record's target")
    public_records: int = Field(ge=1, description="records of the public set Q")
    public: str = Field(pattern="^[0-9a-f]{64}$", description="SHA-256 of public.npz: Q and the test set")
    scale: Literal["none", "public"] = Field("none", description="public: inputs are standardised by Q")


KINDS = {"classes": ("multiclass", "binary"), "labels": ("multilabel",), "numbers": ("regression",)}


class Timeouts(Section):
    """Limits on waiting for neighbours, in seconds, and the quorum of a round."""

    silence: float = Field(10.0, gt=0, le=3600, description="seconds without a response before a neighbour is skipped")
    patience: float = Field(2.0, gt=0, le=3600, description="seconds to wait for a neighbour blocked on a silent peer")
    deadline: float = Field(120.0, gt=0, le=86400, description="seconds that a responsive neighbour may take")
    start: float = Field(3600.0, gt=0, le=604800, description="seconds to wait for neighbours before the first round")
    quorum: int = Field(1, ge=1, description="neighbours that must be present for a round to start")


@dataclass(frozen=True)
class TrainingPlan:
    """Agreed settings and members; member i is agent i."""

    config: Config
    task: TaskDescription
    timeouts: Timeouts
    members: tuple[PeerInfo, ...]
    sources: Mapping[str, str] = field(default_factory=dict)  # installed code by import path, with its SHA-256
    author: str = ""  # as the author says; nothing proves it
    written: str = ""  # canonical JSON of the plan as its author wrote it; empty: made now, by this version

    def __post_init__(self) -> None:
        _check(self)
        if not self.written:
            object.__setattr__(self, "written", _canonical(self.as_dict()))

    def as_dict(self) -> JsonDict:
        config = {name: value for name, value in self.config.as_dict().items() if name not in LOCAL}
        return {
            "format": FORMAT,
            "pdsl": __version__,
            "task": self.task.model_dump(mode="json"),
            "timeouts": self.timeouts.model_dump(mode="json"),
            "config": config,
            "member": [card.as_dict() for card in self.members],
            **({"sources": dict(self.sources)} if self.sources else {}),
            **({"author": self.author} if self.author else {}),
        }

    @cached_property  # compared with every request
    def hash(self) -> str:
        """SHA-256 of all values as written, in canonical JSON, independent of the layout of the file."""
        return hashlib.sha256(self.written.encode()).hexdigest()

    @property
    def active(self) -> list[int]:
        """Members that have not left."""
        return list(range(len(self.members)))

    @property
    def original_hash(self) -> str:
        """Hash of the plan without its amendments: ledger, charge marker and receipts are bound to it."""
        return self.hash

    @property
    def last_round(self) -> int:
        """Last round in which this plan is in force."""
        return self.config.rounds

    def joining_round(self, agent: int) -> int:
        """First round of a member."""
        return 1

    def refresh(self) -> bool:
        """Load amendments that were stored meanwhile. Returns whether there were any."""
        return False

    def is_abandoned(self, agent: int) -> bool:
        """Whether all neighbours of an agent are known to be silent: later amendments of others remove them."""
        return False

    def accepts(self, digest: str, t: int) -> bool:
        """Whether a request for round t may carry this hash; t = 0: an answer, or a request for no round."""
        return digest == self.hash

    @cached_property
    def graph(self) -> Graph:
        return topology.build(self.config.graph, Streams(self.config.seed))

    def build_task(self, public: Tensor | None = None) -> Task:
        """The task; class weights and scales come from the targets of the public set, if these are given.

        A loss or metric that the plan names is imported, after its installed source was compared with the plan's.
        """
        check_sources(self.sources)
        settings, targets = self.config.task, self.example_targets if public is None else public
        return build_task(settings, self.task_kind, self.task.classes, targets)

    @property
    def task_kind(self) -> str:
        """Meaning of the targets: as set, or by the type of the public targets."""
        settings = self.config.task
        if settings.kind != "auto":
            return settings.kind
        own_numbers = settings.loss is not None and self.task.targets == "numbers"
        return "custom" if own_numbers else KINDS[self.task.targets][0]

    @property
    def example_targets(self) -> Tensor:
        """Two targets of the type and shape that the plan describes."""
        dtype = torch.float32 if self.task.targets == "numbers" else torch.int64
        return torch.zeros(2, *self.task.target_shape, dtype=dtype)

    @property
    def example_inputs(self) -> Tensor:
        """Two records of the type and shape that the plan describes."""
        return torch.zeros(2, *self.task.shape, dtype=torch.int64 if needs_integers(self.config) else torch.float32)

    def agent(self, name: str) -> int:
        """Index of the agent of an organisation."""
        for i, card in enumerate(self.members):
            if card.name == name:
                return i
        raise PdslError(f"the plan has no member {name}; its members: {', '.join(card.name for card in self.members)}")

    def neighbours(self, agent: int) -> list[int]:
        """Neighbours of an agent, without the agent itself."""
        return [int(j) for j in self.graph.neighbourhood(agent) if j != agent]

    def to_toml(self) -> str:
        return tomli_w.dumps({"hash": self.hash, **json.loads(self.written)}, multiline_strings=True)

    @classmethod
    def read(cls, path: Path) -> "TrainingPlan":
        return cls.from_values(read_toml(path, "plan"), str(path))

    @classmethod
    def parse(cls, content: bytes, where: str) -> "TrainingPlan":
        return cls.from_values(parse_toml(content, where, "plan"), where)

    @classmethod
    def from_values(cls, values: JsonDict, where: str) -> "TrainingPlan":
        """Validate an untrusted plan; PdslError if any part of it is invalid, its hash included."""
        expected = {"hash", "format", "pdsl", "task", "timeouts", "config", "member"}
        if values.get("format") != FORMAT:
            raise PdslError(
                f"{where}: plan format {values.get('format')!r:.20}, but this version of pdsl reads format {FORMAT};"
                " use the same version as the plan's author"
            )
        if set(values) - OPTIONAL != expected:
            raise PdslError(f"{where}: a plan has exactly {', '.join(sorted(expected))}; request the plan again")
        written = _canonical({name: value for name, value in values.items() if name != "hash"}, where)
        if hashlib.sha256(written.encode()).hexdigest() != values["hash"]:
            raise PdslError(f"{where}: its hash does not match its content: changed or damaged; request the plan again")
        try:
            return cls._validate(values, where, written)
        except PdslError as e:
            if values["pdsl"] == __version__:
                raise
            made = printable(str(values["pdsl"]), 20)
            raise PdslError(f"{e} (the plan was made by pdsl {made}, and this is {__version__})") from e

    @classmethod
    def _validate(cls, values: JsonDict, where: str, written: str) -> "TrainingPlan":
        member, config = values["member"], values["config"]
        if not isinstance(member, list) or not 2 <= len(member) <= MAX_MEMBERS or not isinstance(config, dict):
            raise PdslError(f"{where}: no list of 2 to {MAX_MEMBERS} members, or no config; request the plan again")
        if local := set(config) & set(LOCAL):
            raise PdslError(f"{where}: a plan cannot set config.{min(local)}; request the plan again")
        algorithm = config.get("algorithm", {})
        name = algorithm.get("name", PDSL.name) if isinstance(algorithm, dict) else None
        if name not in list(ALGORITHMS):  # checked before validation, because an import path would run code
            raise PdslError(f"{where}: algorithm.name={name!r:.60} is not built in; choose {', '.join(ALGORITHMS)}")
        cards = tuple(PeerInfo.from_values(values, f"{where}: member {i}") for i, values in enumerate(member))
        task = validate_section(TaskDescription, "task", values["task"], where)
        timeouts = validate_section(Timeouts, "timeouts", values["timeouts"], where)
        sources, author = values.get("sources", {}), values.get("author", "")
        if not isinstance(sources, dict) or not all(isinstance(digest, str) for digest in sources.values()):
            raise PdslError(f"{where}: sources is not a table of import paths and SHA-256; request the plan again")
        return cls(validate(config, where), task, timeouts, cards, sources=sources, author=author, written=written)


def _canonical(values: JsonDict, where: str = "plan") -> str:
    try:
        return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError, RecursionError) as e:  # dates, infinite numbers, too deep
        raise PdslError(f"{where}: a value that no plan has ({e}); request the plan again") from e


def format_hash(digest: str) -> str:
    """A hash in groups of eight digits, for reading aloud."""
    return " ".join(digest[i : i + 8] for i in range(0, len(digest), 8))


def compose(
    cards: Sequence[PeerInfo],
    config: Path | None,
    assignments: Sequence[str],
    task: TaskDescription,
    timeouts: Timeouts,
    model: Mapping[str, Any] | None = None,
    author: str = "",
) -> TrainingPlan:
    """Create a plan from cards and settings, without the sections that each organisation sets for itself.

    Noise between organisations is always secret, whatever `privacy.randomness` says. Mixing is robust unless the
    settings say otherwise, or the algorithm does not gossip. `model`: settings of a model instead of those in the
    config, see `model_export`. The plan has the SHA-256 of a file of weights and of the source of each import path, as
    they are on this machine.
    """
    agreed = [f"graph.agents={len(cards)}", "privacy.randomness=system"]
    given = load(config, [*assignments, *agreed])
    if given.algorithm.gossips and "robust" not in given.mixing.model_fields_set:
        given = load(config, [*assignments, *agreed, "mixing.robust=true"])
    own: JsonDict = {section: Config.model_fields[section].get_default() for section in LOCAL}
    settings = given.model if model is None else ModelSettings.build("model", model)
    if model is not None and given.model != ModelSettings():
        raise PdslError("--model and the settings model.* both give a model; leave one of them out")
    if settings.name == "auto":
        name = "linear" if given.public.has_features else DEFAULT_MODEL.get(given.data.name, "mlp")
        settings = settings.model_copy(update={"name": name})
    if settings.weights_path is not None:
        digest = file_sha256(Path(settings.weights_path).expanduser(), "give the path of a safetensors file")
        settings = settings.model_copy(update={"weights_path": None, "weights_sha256": digest})
    shared = given.model_copy(update={**own, "model": settings})
    task = task.model_copy(update={"scale": given.data.scale or "none"})
    for setting, path in code_paths(shared).items():
        check_path(path, setting)
    sources = {path: source_sha256(path) for path in code_paths(shared).values()}
    return TrainingPlan(shared, task, timeouts, tuple(cards), sources=sources, author=author)


def file_sha256(path: Path, advice: str) -> str:
    try:
        return hashlib.sha256(read_file(path)).hexdigest()
    except OSError as e:
        raise PdslError(f"{path}: {e.strerror}; {advice}") from e


S = TypeVar("S", bound=Section)


def validate_section(kind: type[S], name: str, values: object, where: str) -> S:
    """Validate a section of a plan; the first mistake becomes a one-line PdslError."""
    try:
        return kind.model_validate(values)
    except ValidationError as e:
        first = e.errors()[0]
        key = ".".join(str(part) for part in (name, *first["loc"]))
        raise PdslError(f"{where}: {key}: {first['msg']}; change it") from e


def _check(plan: TrainingPlan) -> None:
    """Refuse settings that members cannot share in a file, or that would let a plan run code or read files."""
    config, names = plan.config, [card.name for card in plan.members]
    addresses = [card.address for card in plan.members if card.address != NO_ADDRESS]
    if not addresses:
        raise PdslError("plan: no member has an address, so none can be called; at least one needs a host:port")
    if len(set(names)) < len(names) or len(set(addresses)) < len(addresses):
        raise PdslError("plan: two members have the same name or address; include each card once")
    if len({card.certificate for card in plan.members}) < len(names):
        raise PdslError("plan: two members have the same certificate; include each card once")
    if config.graph.agents != len(names):
        raise PdslError(f"plan: graph.agents={config.graph.agents}, but the plan has {len(names)} members")
    if config.graph.kind in ("file", "python") or config.graph.path is not None:
        raise PdslError("plan: a graph.kind that needs no file is required; choose ring, full, star or similar")
    if config.graph.kind in topology.SCHEDULES:
        raise PdslError(
            f"plan: graph.kind={config.graph.kind} changes from round to round, and peers keep their neighbours;"
            " choose ring, full, exponential or similar"
        )
    if min(plan.task.shape) < 1 or math.prod(plan.task.shape) > MAX_RECORD_SIZE:
        raise PdslError(f"plan: task.shape={plan.task.shape} is not a valid record shape; correct it")
    check_paths(config, plan.sources)
    if not all(SHA256.fullmatch(digest) for digest in plan.sources.values()):
        raise PdslError("plan: sources must have the SHA-256 of each package; request the plan again")
    if plan.author and (not isinstance(plan.author, str) or not AUTHOR.fullmatch(plan.author)):
        raise PdslError("plan: author is not a line of 1 to 100 characters; correct it")
    check_model(config, plan.task.shape, plan.task.public_records)
    if needs_integers(config) and plan.task.scale == "public":
        raise PdslError("plan: task.scale=public standardises floats, but the model starts with an embedding; omit it")
    own_loss = ("custom",) if config.task.loss is not None else ()
    if config.task.kind not in ("auto", *KINDS[plan.task.targets], *own_loss):
        raise PdslError(
            f"plan: task.kind={config.task.kind}, but the public targets are {plan.task.targets}; choose"
            f" {' or '.join(KINDS[plan.task.targets])}"
        )
    if plan.task.targets != "numbers" and plan.task.classes < (1 if plan.task.targets == "labels" else 2):
        raise PdslError(f"plan: task.classes={plan.task.classes} is too few; correct it")
    config.algorithm.check_task(_task_without_code(plan))
    if config.privacy.mode == "none" or config.privacy.randomness != "system":
        raise PdslError("plan: peers always add secret noise; set privacy.mode=total and privacy.randomness=system")
    if 0 in (config.privacy.sigma, config.privacy.noise_multiplier):
        raise PdslError("plan: privacy.sigma=0 or noise_multiplier=0 adds no noise; omit it, and σ is calibrated")
    if config.privacy.budget is None:
        raise PdslError("plan: there is no privacy budget; set one, for example privacy.target_epsilon=4")
    if config.batch.sampler != "poisson":
        raise PdslError("plan: batch.sampler=fixed would reveal the size of each member's data; choose poisson")
    if not isinstance(config.algorithm.learning_rate, int | float) and config.algorithm.learning_rate != AUTO:
        raise PdslError("plan: algorithm.learning_rate must be a number or auto; a function would let a plan run code")
    if config.attack != AttackSettings():
        raise PdslError("plan: [attack] is for simulations only; omit it")
    degrees = [len(plan.neighbours(i)) for i in range(len(names))]
    if plan.timeouts.quorum > min(degrees):
        raise PdslError(
            f"plan: timeouts.quorum={plan.timeouts.quorum}, but a member has {min(degrees)} neighbours; lower it"
        )
    config.algorithm.check(max(degrees) + 1)


def _task_without_code(plan: TrainingPlan) -> Task:
    """The task, with a stand-in for a loss that the plan names: nothing is imported when a plan is read."""
    own = None if plan.config.task.loss is None else MultiClass().losses
    settings = plan.config.task.model_copy(update={"loss": None, "metric": None})
    return build_task(settings, plan.task_kind, plan.task.classes, plan.example_targets, loss=own)
