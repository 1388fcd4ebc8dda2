"""Fields of a stored account, checked one by one because the file may come from anybody. Problems are a ValueError."""

import math

import numpy as np

from pdsl.shapley.coalitions import Values

MAX_NAME = 200  # letters of a party's name
MAX_TEXT = 2000  # letters of a note
MAX_VALUE = 1e100  # sums of larger values might not be finite
TOLERANCE = 1e-9  # of rounding in a stored account, relative to its largest number


def read_list(record: dict[str, object], key: str) -> list[object]:
    given = record.get(key)
    if not isinstance(given, list):
        raise ValueError(f"{key} is not a list")
    return given


def read_objects(record: dict[str, object], key: str) -> list[dict[str, object]]:
    given = read_list(record, key)
    if not all(isinstance(entry, dict) for entry in given):
        raise ValueError(f"{key} is not a list of JSON objects")
    return [entry for entry in given if isinstance(entry, dict)]


def read_number(record: dict[str, object], key: str) -> float:
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MAX_VALUE:
        raise ValueError(f"{key} is not a finite number")
    return float(value)


def read_count(record: dict[str, object], key: str) -> int:
    value = read_number(record, key)
    if value < 0 or not value.is_integer():
        raise ValueError(f"{key} is not a whole number")
    return int(value)


def read_text(given: object, what: str, most: int) -> str:
    """A short text without control characters, which a terminal would obey."""
    if not isinstance(given, str) or len(given) > most or not given.replace("\N{NO-BREAK SPACE}", " ").isprintable():
        raise ValueError(f"{what} is not a printable text of at most {most} letters")
    return given


def read_names(parties: list[dict[str, object]]) -> tuple[str, ...]:
    names = tuple(read_text(party.get("name"), "a name", MAX_NAME) for party in parties)
    if not names or not all(names) or len(set(names)) < len(names):
        raise ValueError("the parties have no distinct names")
    return names


def read_margin(interval: dict[str, object]) -> float:
    low, high = read_number(interval, "low"), read_number(interval, "high")
    if low > high:
        raise ValueError("an interval ends before it starts")
    return (high - low) / 2


def read_pair_margins(pairs: list[dict[str, object]], names: tuple[str, ...]) -> Values:  # [n, n]
    place = {name: j for j, name in enumerate(names)}
    margins = np.full((len(names), len(names)), np.nan)
    np.fill_diagonal(margins, 0.0)
    for pair in pairs:
        i, j = (place.get(read_text(pair.get(key), key, MAX_NAME), -1) for key in ("first", "second"))
        if min(i, j) < 0 or not np.isnan(margins[i, j]):
            raise ValueError("a pair is there twice, or is not of two parties")
        margins[i, j] = margins[j, i] = read_margin(pair)
    if np.isnan(margins).any():
        raise ValueError(f"pairs are not one for each two of the {len(names)} parties")
    return margins


def agree(made: object, given: object, tolerance: float) -> bool:
    """Whether a record that was read has everything that its account would write, up to rounding."""
    if isinstance(made, dict):
        return isinstance(given, dict) and all(agree(value, given.get(key), tolerance) for key, value in made.items())
    if isinstance(made, list):
        if not isinstance(given, list) or len(given) != len(made):
            return False
        return all(agree(a, b, tolerance) for a, b in zip(made, given, strict=True))
    if isinstance(made, float):
        if isinstance(given, bool) or not isinstance(given, int | float):
            return False
        return math.isclose(made, given, rel_tol=TOLERANCE, abs_tol=tolerance)
    return bool(made == given)
