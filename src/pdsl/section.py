"""A section of settings: frozen, typed, and it refuses unknown names."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from pdsl.utils.errors import PdslError
from pdsl.utils.types import JsonDict


class Section(BaseModel):
    """A group of settings, like `[graph]` in a TOML file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def build(cls, name: str, values: Mapping[str, object]) -> Self:
        """Section from values; an error is one line with the setting and the allowed values. `name`: of the section."""
        try:
            return cls.model_validate(values)
        except ValidationError as e:
            first = e.errors()[0]
            setting = ".".join([name, *(str(part) for part in first["loc"][:1])])
            raise PdslError(f"{setting}{show_value(first['input'])}: {FORMS.get(setting, first['msg'])}") from e


# Forms of settings for which the messages of the validation do not say what to give.
FORMS = {
    "data.classes": 'give the number of classes, or all labels in order, like classes=["benign", "malignant"]',
    "data.owner": 'give the name of a column of a table, like owner="hospital"; for other data, give a list or mapping'
    " with one entry per agent",
    "data.target": 'give the name of a column, like target="diagnosis", or a list of names',
    "data.columns": 'give a list of names of columns, like columns=["age", "weight"]',
    "data.categories": 'give the values of each column of text, like categories={"sex": ["f", "m"]}',
    "task.class_weights": 'give "public" (balanced by the counts in the public set), one positive number per class, or'
    ' a mapping from class names to numbers, like {"benign": 1, "malignant": 2}',
}


def show_value(value: object) -> str:
    """A wrong value for an error line: =value if it is short and no record."""
    return f"={value}" if isinstance(value, str | int | float) else ""


def flat(settings: Mapping[str, Any], prefix: str = "") -> JsonDict:
    """Nested settings by their full names, like graph.kind."""
    found: JsonDict = {}
    for name, value in settings.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def describe_section(section: type[Section], prefix: str = "") -> Iterator[tuple[str, object, str]]:
    """(name, default, one line of help) of every setting of a section, in order; sections within it come last."""
    defaults = {name: field.get_default() for name, field in section.model_fields.items()}
    for name, default in defaults.items():
        if not isinstance(default, Section):
            yield f"{prefix}{name}", default, _help(section.model_fields[name])
    for name, default in defaults.items():
        if isinstance(default, Section):
            yield from describe_section(type(default), f"{prefix}{name}.")


def _help(field: FieldInfo) -> str:
    """Description of a setting, with the values that it may have unless the description names all of them."""
    text, choices = field.description or "", _choices(field.annotation)
    named = all(re.search(rf"(?<![\w-]){re.escape(value)}(?![\w-])", text) for value in choices)
    return text if named else f"{text}; one of {', '.join(choices)}".removeprefix("; ")


def _choices(annotation: object) -> list[str]:
    """Words that a setting may have: those of a Literal, which may be part of a union."""
    if get_origin(annotation) is Literal:
        return [value for value in get_args(annotation) if isinstance(value, str)]
    return [value for part in get_args(annotation) for value in _choices(part)]


def setting_names(section: type[Section], prefix: str = "") -> set[str]:
    return {name for name, _, _ in describe_section(section, prefix)}
