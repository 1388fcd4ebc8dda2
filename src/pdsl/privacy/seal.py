"""Seal of a run: keyed digests of everything that determines its messages.

Noise drawn once must not be added to anything else, and the messages charged must be the messages sent. So the noise
streams are derived from the run's secret *and* these digests: a copy of a run that is resumed with other settings,
data, model or noise draws other noise. A run can be resumed only with the settings, data and secret it started with:
its ledger contains the digests, and ledger and checkpoints are authenticated with the secret.
"""

import hashlib
import hmac
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pdsl.privacy.accounting import Mechanism
from pdsl.privacy.ledger import Ledger
from pdsl.section import flat
from pdsl.topology import Graph, Schedule
from pdsl.utils.errors import PdslError
from pdsl.utils.inputs import tensors_digest

Code = type | Callable[..., object]
DIGESTS, SEAL = "tied_to", "seal"  # fields of ledger.json
PARTS = {  # digest → the part that changed; the secret first, because it is the key of the others
    "secret": "secret.key",
    "settings": "config.toml (or the default settings of this version of pdsl)",
    "records": "the data",
    "graph": "the graph",
    "model": "the model's code or initial weights",
    "noise": "the noise",
    "device": "engine.device",
    "software": "the version of pdsl or torch",
}


@dataclass(frozen=True)
class RunSeal:
    digests: Mapping[str, str]  # by the names in PARTS
    secret: bytes = field(repr=False)  # empty if noise is seeded

    @classmethod
    def of(cls, secret: bytes, **digests: str) -> "RunSeal":
        """Build the seal from the digests of all PARTS except the secret, which becomes their key."""
        keyed = {name: _code(secret, digest) for name, digest in digests.items()}
        return cls({"secret": hashlib.sha256(secret).hexdigest(), **keyed}, secret)

    @property
    def context(self) -> bytes:
        """Encoding of everything that determines a message; noise and batches are derived from it."""
        return json.dumps(self.digests, sort_keys=True).encode()

    @property
    def checkpoint_key(self) -> bytes:
        """Key that authenticates checkpoints; empty without a secret."""
        return hmac.digest(self.secret, b"checkpoints" + self.context, "sha256") if self.secret else b""

    def sign(self, ledger: Ledger, costs: bool = False, stopped: str | None = None) -> str:
        """Serialise the ledger with its digests and its authentication code; `stopped`: why the run ended early."""
        extra = {DIGESTS: self.digests, SEAL: self._seal(ledger)} | ({"stopped": stopped} if stopped else {})
        return ledger.to_json(costs, extra)

    def verify(self, ledger: Ledger, text: str, where: str) -> None:
        """Raise PdslError unless the ledger in `text` was signed by this seal and is unchanged."""
        stored = json.loads(text)
        digests = stored.get(DIGESTS)
        if not isinstance(digests, dict):
            raise PdslError(f"{where} has no digests of its run, so the privacy spent is unknown; start a new run")
        for name, digest in self.digests.items():
            if digests.get(name) != digest:
                raise PdslError(
                    f"{where}: {PARTS[name]} changed since the run started, and its noise must not be used again;"
                    " restore the original, or start a new run"
                )
        if not hmac.compare_digest(str(stored.get(SEAL)).encode(), self._seal(ledger).encode()):
            raise PdslError(
                f"{where} was changed, so the privacy spent is unknown; restore the original, or start a new run"
            )

    def _seal(self, ledger: Ledger) -> str:
        return _code(self.secret, json.dumps([dict(self.digests), ledger.to_json()]))


def _code(secret: bytes, text: str) -> str:
    """Keyed digest. Without the secret it cannot be computed, so it does not help to guess private records."""
    return hmac.digest(secret or b"seeded", text.encode(), "sha256").hex()


def settings_digest(settings: Mapping[str, Any], excluded: Sequence[str]) -> str:
    """Digest of nested settings without those `excluded`, named as section.name or name."""
    included = {name: value for name, value in flat(settings).items() if name not in excluded}
    return hashlib.sha256(json.dumps(included, sort_keys=True).encode()).hexdigest()


def graph_digest(graph: Graph) -> str:
    """Digest of the edges and weights of all rounds."""
    rounds = graph.graphs if isinstance(graph, Schedule) else (graph,)
    arrays = (array for of_round in rounds for array in (of_round.receiver, of_round.sender, of_round.omega))
    return tensors_digest(torch.as_tensor(array) for array in arrays)


def model_digest(module: nn.Module) -> str:
    """Digest of a module's structure, weights and buffers, and of the source files of its classes."""
    tensors = tensors_digest([*module.parameters(), *module.buffers()])
    return hashlib.sha256(f"{module} {tensors} {code_digest({type(m) for m in module.modules()})}".encode()).hexdigest()


def code_digest(classes: Iterable[Code]) -> str:
    """Digest of the source files of code outside torch and pdsl; of its names if there is no source file."""
    own = [c for c in classes if c.__module__.partition(".")[0] not in ("torch", "pdsl")]
    return hashlib.sha256("\n".join(sorted(_code_of(c) for c in own)).encode()).hexdigest()


def _code_of(kind: Code) -> str:
    name = f"{kind.__module__}.{getattr(kind, '__qualname__', type(kind).__qualname__)}"
    try:
        file = inspect.getsourcefile(kind)
        return f"{name} {hashlib.sha256(Path(file or '').read_bytes()).hexdigest()}"
    except (OSError, TypeError):
        return name  # defined in an interpreter: there is no file


def noise_digest(mechanisms: Sequence[Mechanism] | None) -> str:
    text = json.dumps([asdict(m) for m in mechanisms or ()])
    return hashlib.sha256(text.encode()).hexdigest()


@lru_cache(maxsize=1)
def software() -> str:
    """Versions that determine how messages are rounded."""
    return f"pdsl {version('pdsl')}, torch {torch.__version__}, {sys.byteorder}-endian"
