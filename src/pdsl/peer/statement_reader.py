"""Reader of statements, which may come from anybody: bounded in size, canonical, signed by a member, and consistent."""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pdsl.peer.messages import MAX_VALUE as MAX_PARAMETER
from pdsl.peer.plan import TrainingPlan
from pdsl.peer.signatures import is_signed
from pdsl.peer.statement import FORMAT, PURPOSE, Measurement, Statement, canonical
from pdsl.shapley.account_fields import MAX_VALUE, read_count, read_number, read_objects
from pdsl.shapley.coalitions import Values
from pdsl.shapley.masses import BLOCKS, are_products, estimate_masses
from pdsl.utils.errors import PdslError
from pdsl.utils.files import read_file
from pdsl.utils.format import printable
from pdsl.utils.types import JsonDict

KEYS = {"format", "plan", "name", "rounds", "epsilon", "delta", "model", "parties", "signature"}
PARTY_KEYS = {"name", "rounds", "mass", "low", "high", "sums"}
NUMBER_BYTES = 26  # longest number in JSON, with its comma
MAX_FRAME, MAX_PARTY = 20_000, 400  # bytes of a statement without its model and parties, and of a party without sums
MAX_MASS = 1e4  # records of an average agent
ROUNDING = 1e-6  # of an estimate that is computed again


@dataclass(frozen=True)
class StatementReader:
    """Parser of statements of one plan, which may come from anybody. A problem is a PdslError."""

    plan: TrainingPlan
    certificates: Mapping[str, Sequence[str]]  # trusted certificates (PEM) of each member
    parameters: int  # of the model
    groups: int  # of public records

    def read(self, path: Path) -> Statement:
        members = len(self.plan.members)
        sums = members * BLOCKS * (self.groups + 1) * self.groups * NUMBER_BYTES
        limit = MAX_FRAME + MAX_PARTY * members + 6 * self.parameters + sums
        try:
            content = read_file(path, limit + 1)
        except OSError as e:
            raise PdslError(f"{path}: {e.strerror}; give the path of a statement") from e
        if len(content) > limit:
            raise PdslError(f"{path}: larger than {limit:,} bytes, so no statement of this plan; request it again")
        return self.parse(content, str(path))

    def parse(self, content: bytes, where: str) -> Statement:
        """A statement whose signature and values are checked."""
        values = _parse_json(content, where)
        if values.get("format") != FORMAT or set(values) != KEYS:
            raise PdslError(f"{where}: not a statement of format {FORMAT}; request it again")
        name = str(values["name"])
        if values["plan"] != self.plan.hash:
            raise PdslError(f"{where}: a statement of another plan; give statements of plan {self.plan.hash[:8]}…")
        if name not in self.certificates:
            raise PdslError(f"{where}: the plan has no member {printable(name, 40)!r}; leave this statement out")
        self._check_signature(values, where)
        try:
            return self._read_values(values)
        except ValueError as e:
            raise PdslError(f"{where}: signed by {name}, but {e}; request it again") from e

    def _check_signature(self, values: JsonDict, where: str) -> None:
        name, signature = str(values["name"]), values["signature"]
        signed = canonical({key: value for key, value in values.items() if key != "signature"})
        trusted = self.certificates[name]
        if not isinstance(signature, str) or not any(is_signed(pem, PURPOSE, signed, signature) for pem in trusted):
            raise PdslError(
                f"{where}: not signed with {name}'s key, so forged or altered; request it from {name} again (if {name}"
                " has renewed its key, add its new card with --card)"
            )

    def _read_values(self, values: JsonDict) -> Statement:
        """The checked values; ValueError says what is wrong."""
        rounds, name = read_count(values, "rounds"), str(values["name"])
        if not 1 <= rounds <= self.plan.config.rounds:
            raise ValueError(f"rounds is not between 1 and {self.plan.config.rounds}")
        spent = None if values["epsilon"] is None else read_number(values, "epsilon")
        if (spent or 0) < 0 or read_number(values, "delta") != self.plan.config.privacy.delta:
            raise ValueError("epsilon is negative, or delta is not that of the plan")
        expected = [self.plan.members[j].name for j in self.plan.graph.neighbourhood(self.plan.agent(name)).tolist()]
        parties = read_objects(values, "parties")
        if [party.get("name") for party in parties] != expected:
            raise ValueError("its parties are not its neighbourhood in the plan")
        measurements = tuple(self._read_party(party, rounds) for party in parties)
        return Statement(self.plan.hash, name, rounds, spent, values["delta"], self._read_model(values), measurements)

    def _read_model(self, values: JsonDict) -> NDArray[np.float32]:
        text = values["model"]
        if not isinstance(text, str):
            raise ValueError("its model is not text")
        content = base64.b64decode(text, validate=True)
        if len(content) != 4 * self.parameters:
            raise ValueError(f"its model does not have {self.parameters:,} parameters")
        model = np.frombuffer(content, dtype="<f4").astype(np.float32)
        if not (np.abs(model) <= MAX_PARAMETER).all():
            raise ValueError("its model has infinite, undefined or very large parameters")
        return model

    def _read_party(self, party: dict[str, object], rounds: int) -> Measurement:
        if set(party) != PARTY_KEYS:
            raise ValueError("a party has missing or unknown values")
        name, attended = str(party["name"]), read_count(party, "rounds")
        sums = self._read_sums(party["sums"])
        if attended > rounds:
            raise ValueError(f"it has more rounds with {name} than it has run")
        if not _has_masses(sums):
            raise ValueError(f"its sums for {name} have no masses up to {MAX_MASS:,.0f}")
        found = Measurement(name, attended, sums)
        if not _same_estimate(found.as_dict(), party):
            raise ValueError(f"its estimate for {name} contradicts its sums")
        return found

    def _read_sums(self, given: object) -> Values:
        """Finite sums [BLOCKS, G + 1, G] of products that some vectors have."""
        shape = (BLOCKS, self.groups + 1, self.groups)
        if not _has_shape(given, shape):
            raise ValueError(f"its sums are not {' x '.join(map(str, shape))} finite numbers")
        sums: Values = np.array(given, dtype=np.float64)
        if not are_products(sums):
            raise ValueError("its sums are not sums of products")
        return sums


def _has_masses(sums: Values) -> bool:
    """Whether masses are found from the sums, and are not so large that a model trained with them would overflow."""
    try:
        return bool((estimate_masses(sums[:, None]).masses <= MAX_MASS).all())
    except (RuntimeError, np.linalg.LinAlgError):  # no convergence
        return False


def _parse_json(content: bytes, where: str) -> JsonDict:
    """A JSON object in canonical form, so that there is one reading of the file."""
    try:
        values = json.loads(content)
        same = isinstance(values, dict) and canonical(values) == content.strip()
    except (ValueError, RecursionError) as e:
        raise PdslError(f"{where}: not a statement ({printable(str(e), 80)}); request it again") from e
    if not same:
        raise PdslError(f"{where}: not a JSON object in canonical form, as `pdsl peer run` writes it; request it again")
    parsed: JsonDict = values
    return parsed


def _has_shape(given: object, shape: tuple[int, ...]) -> bool:
    """Whether nested lists of bounded numbers have this shape."""
    if not shape:
        return not isinstance(given, bool) and isinstance(given, int | float) and abs(given) < math.sqrt(MAX_VALUE)
    return isinstance(given, list) and len(given) == shape[0] and all(_has_shape(part, shape[1:]) for part in given)


def _same_estimate(made: JsonDict, given: Mapping[str, object]) -> bool:
    def same(key: str) -> bool:
        a, b = made[key], given[key]
        if a is None or b is None:
            return a is b
        numeric = isinstance(b, int | float) and not isinstance(b, bool)
        return numeric and math.isclose(a, float(str(b)), rel_tol=ROUNDING, abs_tol=ROUNDING)

    return all(same(key) for key in ("mass", "low", "high"))
