"""A run's whole configuration: settings and algorithm together, from TOML, `--set` or Python, and back to TOML."""

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import tomli_w
from pydantic import Field, InstanceOf, SerializeAsAny, ValidationError, field_validator, model_validator

from pdsl.algorithms import ALGORITHMS, PDSL, Algorithm
from pdsl.errors import PdslError
from pdsl.imports import import_object
from pdsl.settings import (
    BatchSettings,
    DataSettings,
    EngineSettings,
    GraphSettings,
    ModelSettings,
    PartitionSettings,
    PrivacySettings,
    RogueSettings,
    Section,
    ShapleySettings,
)


class Config(Section):
    """Everything that decides what a run computes."""

    rounds: int = Field(100, ge=1, description="rounds T")
    seed: int = Field(0, ge=0, description="seed of partition, graph, first model, batches, noise and permutations")
    evaluate_every: int = Field(1, ge=1, description="rounds between evaluations on the test set")
    checkpoint_every: int = Field(1, ge=1, description="rounds between checkpoints")
    averaging: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="β: agents hand out the running mean of their models, β old (less at first), 1-β new; 0: the last",
    )
    data: DataSettings = DataSettings()
    partition: PartitionSettings = PartitionSettings()
    graph: GraphSettings = GraphSettings()
    model: ModelSettings = ModelSettings()
    batch: BatchSettings = BatchSettings()
    algorithm: SerializeAsAny[InstanceOf[Algorithm]] = PDSL()
    shapley: ShapleySettings = ShapleySettings()
    privacy: PrivacySettings = PrivacySettings()
    rogue: RogueSettings = RogueSettings()
    engine: EngineSettings = EngineSettings()

    @field_validator("algorithm", mode="before")
    @classmethod
    def _by_name(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        fields = dict(value)
        name = fields.pop("name", PDSL.name)
        if isinstance(name, str) and ":" in name:
            return _own_algorithm(name).model_validate(fields)
        if not isinstance(name, str) or name not in ALGORITHMS:
            raise ValueError(f"no algorithm '{name}'; there are: {', '.join(ALGORITHMS)}, or package.module:Class")
        return ALGORITHMS[name].model_validate(fields)

    @model_validator(mode="after")
    def _shapley_belongs_to_the_algorithm(self) -> Self:
        if isinstance(self.algorithm, PDSL) and self.algorithm.shapley != self.shapley:
            if "shapley" in self.model_fields_set:
                merged = self.algorithm.model_copy(update={"shapley": self.shapley})
                object.__setattr__(self, "algorithm", merged)
            else:
                object.__setattr__(self, "shapley", self.algorithm.shapley)
        return self

    def as_dict(self) -> dict[str, Any]:
        """Nested plain values; what is not set is left out."""
        plain = self.model_dump(mode="json", exclude_none=True)
        plain["algorithm"] = {"name": _algorithm_name(self.algorithm), **plain["algorithm"]}
        return plain

    def to_toml(self) -> str:
        return tomli_w.dumps(self.as_dict())


def _own_algorithm(path: str) -> type[Algorithm]:
    try:
        kind = import_object(path, "algorithm.name")
    except PdslError as e:
        raise ValueError(str(e)) from e
    if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
        raise ValueError(f"{path} is no pdsl.Algorithm; give a class that is one")
    return kind


def _algorithm_name(algorithm: Algorithm) -> str:
    """Its name, or its import path if it is a user's own."""
    kind = type(algorithm)
    if ALGORITHMS.get(getattr(kind, "name", "")) is kind:
        return kind.name
    return f"{kind.__module__}:{kind.__qualname__}"


# Of a run that has begun: what changes no row. A private run stays on its device besides (see `privacy.bond`).
MAY_CHANGE = ("rounds", "checkpoint_every", "engine.workers", "engine.device", "engine.timeout")


def validated(values: Mapping[str, Any], where: str) -> Config:
    """A Config from nested values; a mistake becomes one line that names the setting, the value and what is allowed."""
    try:
        return Config.model_validate(values)
    except ValidationError as e:
        raise PdslError(_one_line(e, where)) from e


def load(path: Path | None, assignments: Sequence[str] = (), base: Mapping[str, Any] | None = None) -> Config:
    """The config of a TOML file (or `base`, or the defaults), changed by `key=value` assignments."""
    values: dict[str, Any] = dict(base or {})
    if path is not None:
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as e:
            raise PdslError(f"{path}: no such config file; 'pdsl config > {path}' writes one with the defaults") from e
        except (OSError, ValueError, RecursionError) as e:  # the last two: no text, no TOML, or brackets without end
            raise PdslError(f"{path}: not a readable TOML file: {e}; 'pdsl config' prints one") from e
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise PdslError(f"--set {assignment}: not of the form key=value, like --set graph.agents=20")
        if not text.strip() and key.strip() not in _names():
            raise PdslError(_unknown(f"--set {assignment}", key.strip()))  # nothing is left of it to be found out later
        _assign(values, key.strip(), text.strip())
    return validated(values, str(path) if path else "settings")


def _assign(values: dict[str, Any], key: str, text: str) -> None:
    """Set a nested value; an empty text takes it back to its default."""
    *sections, last = key.split(".")
    for section in sections:
        inner = values.get(section)
        values[section] = dict(inner) if isinstance(inner, Mapping) else {}
        values = values[section]
    if text:
        values[last] = _parsed(text)
    else:
        values.pop(last, None)


def _parsed(text: str) -> object:
    """A TOML value where the text is one, a plain string otherwise: graph.kind=ring needs no quotes."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except (ValueError, RecursionError):
        return text


def _one_line(error: ValidationError, where: str) -> str:
    found = error.errors()
    first = found[0]
    key, messages = ".".join(str(part) for part in first["loc"]), [first["msg"]]
    if (name := key.rpartition(".")[0]) in _names():  # a setting with several kinds of value: what each kind says
        key, messages = name, [other["msg"] for other in found if other["loc"][:-1] == first["loc"][:-1]]
    if first["type"] == "extra_forbidden":
        return _unknown(where, key)
    message = ", or: ".join(dict.fromkeys(message.removeprefix("Value error, ") for message in messages))
    given = first["input"]
    shown = f"={given}" if isinstance(given, str | int | float) else ""
    return f"{where}: {key}{shown}: {message}; 'pdsl config' lists what is allowed".replace("\n", " ")


def _unknown(where: str, key: str) -> str:
    close = difflib.get_close_matches(key, _names(), n=1)
    hint = f"did you mean {close[0]}?" if close else "'pdsl config' lists them all"
    return f"{where}: unknown setting {key}; {hint}"


def _names() -> list[str]:
    """Every setting, of every algorithm."""
    return [name for kind in ALGORITHMS.values() for name, _, _ in describe(algorithm=kind)]


def describe(
    section: type[Section] = Config, prefix: str = "", algorithm: type[Algorithm] = PDSL
) -> Iterator[tuple[str, object, str]]:
    """(name, default, one line of help) of every setting, in order."""
    for name, field in section.model_fields.items():
        default = field.get_default()
        if field.exclude:
            continue
        if isinstance(default, Algorithm):
            yield f"{prefix}{name}.name", algorithm.name, f"one of: {', '.join(ALGORITHMS)}"
            yield from describe(algorithm, f"{prefix}{name}.")
        elif isinstance(default, Section):
            yield from describe(type(default), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", default, field.description or ""


def commented_toml(config: Config) -> str:
    """Every setting as TOML with its help; what has no value stands there as a comment."""
    values = config.as_dict()
    lines: list[str] = []
    section = ""
    for name, _, text in describe(Config, algorithm=type(config.algorithm)):
        head, _, key = name.rpartition(".")
        if head != section:
            lines += ["", f"[{head}]"]
            section = head
        inner = values[head] if head else values
        assignment = tomli_w.dumps({key: inner[key]}).strip() if key in inner else f"# {key} ="
        lines.append(f"{assignment}  # {text}")
    return "\n".join(lines).lstrip() + "\n"
