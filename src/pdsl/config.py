"""Configuration of a run: all settings with the algorithm, read from TOML, `--set` or Python, and written as TOML."""

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, Literal, get_args

import tomli_w
from pydantic import Field, InstanceOf, SerializeAsAny, ValidationError, field_validator

from pdsl.algorithms import ALGORITHMS, PDSL, Algorithm
from pdsl.aliases import ALIASED, NO_SETTING
from pdsl.models.zoo import default_model
from pdsl.section import FORMS, Section, describe_section, flat, setting_names, show_value
from pdsl.settings import (
    AttackSettings,
    BatchSettings,
    DataSettings,
    EngineSettings,
    GraphSettings,
    MixingSettings,
    ModelSettings,
    PartitionSettings,
    PrivacySettings,
    PublicSettings,
    TaskSettings,
    file_kind,
)
from pdsl.utils.errors import PdslError
from pdsl.utils.imports import import_object
from pdsl.utils.types import JsonDict

BY_NAME = {
    "graph": "kind",
    "partition": "kind",
    "algorithm": "name",
}  # sections that may be given by one name, like graph = "ring"


class Config(Section):
    """All settings that determine the result of a run."""

    rounds: int = Field(100, ge=1, description="rounds T")
    seed: int = Field(0, ge=0, description="seed of partition, graph, initial model, batches, noise and permutations")
    evaluate_every: int = Field(1, ge=1, description="rounds between evaluations on the test set")
    checkpoint_every: int = Field(1, ge=1, description="rounds between checkpoints")
    ema_decay: float = Field(
        0.0, ge=0, lt=1, description="β: EMA decay of the released models (smaller in the first rounds); 0: off"
    )
    baselines: Literal["all", "public", "none"] = Field(
        "all",
        description="baselines after the last round: all, public (the public set alone) or none; private runs, several"
        " ranks and peers: at most public",
    )
    data: DataSettings = DataSettings()
    partition: PartitionSettings = PartitionSettings()
    graph: GraphSettings = GraphSettings()
    public: PublicSettings = PublicSettings()
    model: ModelSettings = ModelSettings()
    task: TaskSettings = TaskSettings()
    batch: BatchSettings = BatchSettings()
    algorithm: SerializeAsAny[InstanceOf[Algorithm]] = PDSL()
    privacy: PrivacySettings = PrivacySettings()
    mixing: MixingSettings = MixingSettings()
    attack: AttackSettings = AttackSettings()
    engine: EngineSettings = EngineSettings()

    @field_validator("graph", "partition", mode="before")
    @classmethod
    def _section_by_kind(cls, value: object) -> object:
        return {"kind": value} if isinstance(value, str) else value

    @field_validator("algorithm", mode="before")
    @classmethod
    def _algorithm_by_name(cls, value: object) -> object:
        if isinstance(value, str):
            value = {BY_NAME["algorithm"]: value}
        if not isinstance(value, Mapping):
            return value
        fields = dict(value)
        name = fields.pop("name", PDSL.name)
        return find_algorithm(name).model_validate(fields)

    @property
    def share_floor(self) -> float:
        """λ of Theorem 1's φ̂_min = λ/k: `privacy.share_floor`, or else the algorithm's own floor."""
        if self.privacy.share_floor is not None:
            return self.privacy.share_floor
        return self.algorithm.shapley.floor if isinstance(self.algorithm, PDSL) else 0.0

    def as_dict(self) -> JsonDict:
        """Nested plain values without the settings that are None."""
        plain = self.model_dump(mode="json", exclude_none=True)
        plain["algorithm"] = {"name": _algorithm_name(self.algorithm), **plain["algorithm"]}
        return plain

    def resolve(self, data: str | None = None) -> "Config":
        """Replace defaults that depend on other settings: the model's name, the total ε and absolute paths.

        data: name of the data, if they were given in Python.
        """
        default = "linear" if self.public.has_features else default_model(data or self.data.name)
        name = default if self.model.name == "auto" else self.model.name
        update = {
            "model": self.model.model_copy(update={"name": name, "weights_path": _absolute(self.model.weights_path)}),
            "data": self.data.model_copy(
                update={"path": _absolute(self.data.path), "test_path": _absolute(self.data.test_path)}
            ),
            "graph": self.graph.model_copy(update={"path": _absolute(self.graph.path)}),
        }
        if self.privacy.mode == "total":
            update["privacy"] = self.privacy.model_copy(update={"target_epsilon": self.privacy.budget})
        return self.model_copy(update=update)

    def to_toml(self) -> str:
        return tomli_w.dumps(self.as_dict())


def find_algorithm(name: object) -> type[Algorithm]:
    """The class of a built-in algorithm, or of the user's own by its path package.module:Class; else ValueError."""
    if isinstance(name, str) and ":" in name:
        return _import_algorithm(name)
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise ValueError(f"no algorithm '{name}'; choose one of {', '.join(ALGORITHMS)}, or package.module:Class")
    return ALGORITHMS[name]


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().absolute())


def _import_algorithm(path: str) -> type[Algorithm]:
    try:
        kind = import_object(path, "algorithm.name")
    except PdslError as e:
        raise ValueError(str(e)) from e
    if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
        raise ValueError(f"{path} is not a pdsl.Algorithm; name a subclass of it")
    return kind


def _algorithm_name(algorithm: Algorithm) -> str:
    """Name of a built-in algorithm, or import path of a custom one."""
    kind = type(algorithm)
    if ALGORITHMS.get(getattr(kind, "name", "")) is kind:
        return kind.name
    return f"{kind.__module__}:{kind.__qualname__}"


# Settings that may change when a run is resumed, because they change no row. A private run also keeps its device.
MAY_CHANGE = ("rounds", "checkpoint_every", "baselines", "engine.workers", "engine.device", "engine.timeout")


def validate(values: Mapping[str, Any], where: str) -> Config:
    """Build a Config from nested values; an error is one line with the setting, its value and the allowed values."""
    try:
        return Config.model_validate(values)
    except ValidationError as e:
        raise PdslError(_error_line(e, where)) from e


def take_agents(config: Config, owners: int | None) -> Config:
    """The config with as many agents as the data have owners, unless graph.agents was set. `owners`: None if none."""
    if owners is None or "agents" in config.graph.model_fields_set:
        return config
    return config.model_copy(update={"graph": config.graph.model_copy(update={"agents": owners})})


def load(path: Path | None, assignments: Sequence[str] = (), base: Mapping[str, Any] | None = None) -> Config:
    """Read a TOML file (or take `base`, or the defaults) and apply `key=value` assignments."""
    values: JsonDict = dict(base or {})
    if path is not None:
        if file_kind(str(path)):
            raise PdslError(
                f"{path}: a config is a TOML file; train on a file of records with --set data.path={path}"
                " --set data.target=COLUMN (tables only)"
            )
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as e:
            raise PdslError(f"{path}: no such config file; 'pdsl config > {path}' writes one with the defaults") from e
        except (OSError, ValueError, RecursionError) as e:  # ValueError: not UTF-8 or not TOML; RecursionError: nesting
            raise PdslError(f"{path}: not a readable TOML file: {e}; 'pdsl config' prints one") from e
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise PdslError(f"--set {assignment}: not of the form key=value, like --set graph.agents=20")
        if not text.strip() and key.strip() not in _names():  # sets nothing that validation could refuse
            raise PdslError(_unknown(f"--set {assignment}", key.strip()))
        _assign(values, key.strip(), text.strip())
    return validate(values, str(path) if path else "settings")


def _assign(values: JsonDict, key: str, text: str) -> None:
    """Set a nested value; an empty text restores the default."""
    *sections, last = key.split(".")
    for section in sections:
        inner = values.get(section)
        if isinstance(inner, str) and section in BY_NAME:
            inner = {BY_NAME[section]: inner}
        values[section] = dict(inner) if isinstance(inner, Mapping) else {}
        values = values[section]
    if text:
        values[last] = _parse_value(text)
    else:
        values.pop(last, None)


def _parse_value(text: str) -> object:
    """Parse a TOML value, or else take the text as a string: graph.kind=ring needs no quotes."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except (ValueError, RecursionError):
        return text


def _error_line(error: ValidationError, where: str) -> str:
    found = error.errors()
    first = found[0]
    key, messages, given = ".".join(str(part) for part in first["loc"]), [first["msg"]], first["input"]
    if (name := key.rpartition(".")[0]) in _names():  # a setting with several types: the message of each type
        key, messages = name, [other["msg"] for other in found if other["loc"][:-1] == first["loc"][:-1]]
    if (setting := next((name for name in FORMS if f"{key}.".startswith(f"{name}.")), None)) is not None:
        return f"{where}: {setting}{show_value(given)}: {FORMS[setting]}"
    if first["type"] in ("model_type", "is_instance_of") and (setting := _main_setting(key, given)):
        return f"{where}: {key}{show_value(given)}: a section of settings; give {_example(setting, given)}"
    if first["type"] == "extra_forbidden":
        takes_mapping = any(name.endswith(f".{key}") for name in FORMS)
        inner = next(iter(flat(given)), "") if isinstance(given, Mapping) and not takes_mapping else ""
        return _unknown(where, f"{key}.{inner}" if inner else key, flat(given)[inner] if inner else given)
    message = ", or: ".join(dict.fromkeys(message.removeprefix("Value error, ") for message in messages))
    return f"{where}: {key}{show_value(given)}: {message}; 'pdsl config' lists the allowed values".replace("\n", " ")


def _main_setting(section: str, given: object) -> str | None:
    """The setting that is probably meant by a single value given for a section."""
    words = {
        "privacy": "mode",
        "engine": "device",
        "task": "kind",
        "public": "features",
        "algorithm": "name",
        "model": "name",
        "data": "name",
    }
    numbers = {"privacy": "target_epsilon", "batch": "size", "graph": "agents", "engine": "workers"}
    numbers |= {"algorithm": "learning_rate", "attack": "label_flip", "partition": "mu"}
    last = (words if isinstance(given, str) else numbers).get(section)
    return last and f"{section}.{last}"


def _unknown(where: str, key: str, value: object = None) -> str:
    """Error line for an unknown setting, with the setting that was probably meant."""
    if key in _names():
        having = [name for name, kind in ALGORITHMS.items() if key in setting_names(kind, "algorithm.")]
        return f"{where}: this algorithm has no setting {key}; these have: {', '.join(having)}"
    meant = hint(key, value) or "'pdsl config' lists all settings"
    return f"{where}: unknown setting {key}; {meant}"


MIN_SIMILARITY = 0.75  # of a name that is suggested for a typing error


def find_setting(key: str) -> str | None:
    """The setting that a name stands for: its own without a section, or that of another library; None if unclear."""
    plain_key = key.lower().replace("-", "_")
    named = [name for name in _names() if name == plain_key or name.endswith(f".{plain_key}")]
    return named[0] if len(named) == 1 else ALIASED.get(plain_key.rpartition(".")[2])


def hint(key: str, value: object = None) -> str | None:
    """The setting that an unknown name was probably meant to be; None if nothing is similar."""
    plain_key, names = key.lower().replace("-", "_"), _names()
    sections = dict.fromkeys(name.rpartition(".")[0] for name in names if "." in name)
    longer = [name for name in names if name == plain_key or name.endswith(f".{plain_key}")]  # a section is missing
    if longer:
        example = f" ({_example(longer[0], value)})" if len(longer) == 1 else ""
        return f"did you mean {' or '.join(longer[:3])}?{example}"
    if (setting := find_setting(key)) is not None:
        return f"did you mean {setting}? ({_example(setting, value)})"
    if (reason := NO_SETTING.get(plain_key.rpartition(".")[2])) is not None:
        return f"there is none, because {reason}"
    similar = difflib.get_close_matches(plain_key, [*names, *sections], n=1, cutoff=MIN_SIMILARITY)
    return f"did you mean {similar[0]}?" if similar else None


# Settings that have another form in Python than a mapping for their section.
IN_PYTHON = {
    "data.name": "data={}",
    "model.name": "model={}",
    "graph.kind": "graph={}",
    "partition.kind": "partition={}",
    "task.kind": "task={}",
    "task.loss": "loss=f",
    "task.metric": "metric=f",
}


def _example(setting: str, value: object = None) -> str:
    """How to give a setting on the command line and in Python. Words of other libraries are not repeated."""
    if setting == "algorithm.name":
        return "'pdsl algorithms' lists them"
    shown = quoted = "package.module:f" if setting in ("task.loss", "task.metric") else "…"
    if shown == "…" and isinstance(value, int | float) and not isinstance(value, bool):
        shown = quoted = str(value)
    elif isinstance(value, str) and _accepts(setting, value):
        shown, quoted = value, f'"{value}"'
    head, *rest = setting.split(".")
    form = IN_PYTHON.get(setting) or (f"{rest[-1]}={{}}" if head == "data" else None)
    inner = reduce(lambda text, name: f'{{"{name}": {text}}}', reversed(rest), quoted)
    in_python = f"{head}={inner}" if form is None else form.format(quoted)
    return f"--set {setting}={shown}; in Python, {in_python}"


def _accepts(setting: str, value: str) -> bool:
    """Whether the value is one of those that the setting names in its type, or a device."""
    *sections, last = setting.split(".")
    section: Section | None = Config()
    for name in sections:
        section = getattr(section, name, None)
    field = type(section).model_fields.get(last) if section is not None else None
    return field is not None and (value in get_args(field.annotation) or setting == "engine.device")


def _names() -> list[str]:
    """Names of all settings of all algorithms."""
    return list(dict.fromkeys(name for kind in ALGORITHMS.values() for name, _, _ in describe(kind)))


def describe(algorithm: type[Algorithm] = PDSL) -> Iterator[tuple[str, object, str]]:
    """(name, default, one line of help) of every setting, in order."""
    for name, field in Config.model_fields.items():
        default = field.get_default()
        if name == "algorithm":
            yield "algorithm.name", algorithm.name, f"one of: {', '.join(ALGORITHMS)}"
            yield from describe_section(algorithm, "algorithm.")
        elif isinstance(default, Section):
            yield from describe_section(type(default), f"{name}.")
        else:
            yield name, default, field.description or ""


def _assignment(key: str, value: object) -> str:
    """A setting as TOML; a mapping is an inline table, because a table would end the section."""
    if not isinstance(value, Mapping):
        return tomli_w.dumps({key: value}).strip()
    items = ", ".join(tomli_w.dumps({name: item}).strip() for name, item in value.items())
    return f"{key} = {{ {items} }}"


def commented_toml(config: Config) -> str:
    """Every setting as TOML with its help; a setting without a value is a comment."""
    values = config.as_dict()
    lines: list[str] = []
    section = ""
    for name, _, text in describe(type(config.algorithm)):
        head, _, key = name.rpartition(".")
        if head != section:
            lines += ["", f"[{head}]"]
            section = head
        inner = reduce(lambda nested, part: nested[part], head.split("."), values) if head else values
        assignment = _assignment(key, inner[key]) if key in inner else f"# {key} ="
        lines.append(f"{assignment}  # {text}")
    return "\n".join(lines).lstrip() + "\n"
