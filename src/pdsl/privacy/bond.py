"""The seal of a run: everything that shapes its messages, as digests under the run's secret.

Noise that was drawn once must not be added to anything else, and the charged messages must be those that are sent. So
the noise streams are derived from the secret *and* these digests: a copy of a run that is resumed with other settings,
data, model or noise draws other noise. And a run is resumed only as the run that it was: its ledger holds the digests
and is sealed under the secret, as its checkpoints are.
"""

import hashlib
import hmac
import inspect
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pdsl.errors import PdslError
from pdsl.graph import Graph
from pdsl.privacy.accounting import Mechanism
from pdsl.privacy.ledger import Ledger
from pdsl.settings import flat

TIED, SEAL = "tied_to", "seal"
CHANGED = {  # the secret first, since it is the key of the others
    "secret": "secret.key is not the one",
    "settings": "config.toml does not have the settings (or this version of pdsl has others)",
    "records": "the data do not have the records",
    "graph": "the graph is not the one",
    "model": "the model's code or first weights are not those",
    "noise": "the noise is not the one",
    "device": "engine.device is not the one",
    "software": "pdsl or torch do not have the version",
}


@dataclass(frozen=True)
class Bond:
    digests: Mapping[str, str]  # by the names of CHANGED
    secret: bytes = field(repr=False)  # empty where noise is seeded and there is no secret

    @classmethod
    def of(cls, secret: bytes, **digests: str) -> "Bond":
        """The seal with digests of all that CHANGED names but the secret itself, which is the key of the others."""
        keyed = {name: _code(secret, digest) for name, digest in digests.items()}
        return cls({"secret": hashlib.sha256(secret).hexdigest(), **keyed}, secret)

    @property
    def context(self) -> bytes:
        """The name of everything that shapes a message: noise and batches are derived from it."""
        return json.dumps(self.digests, sort_keys=True).encode()

    @property
    def checkpoint_key(self) -> bytes:
        """The key under which checkpoints are sealed; empty without a secret."""
        return hmac.digest(self.secret, b"checkpoints" + self.context, "sha256") if self.secret else b""

    def sealed(self, ledger: Ledger, costs: bool = False) -> str:
        """The ledger for its file."""
        return ledger.to_json(costs, {TIED: self.digests, SEAL: self._seal(ledger)})

    def check(self, ledger: Ledger, text: str, where: str) -> None:
        """PdslError unless the ledger in the text was opened under this seal and was not changed since."""
        stored = json.loads(text)
        tied = stored.get(TIED)
        if not isinstance(tied, dict):
            raise PdslError(f"{where} is not tied to its run, so what was spent is not known; start the run anew")
        for name, digest in self.digests.items():
            if tied.get(name) != digest:
                raise PdslError(
                    f"{where}: {CHANGED[name]} that the run started with, and its noise is for no other; restore"
                    " them, or start the run anew"
                )
        if not hmac.compare_digest(str(stored.get(SEAL)).encode(), self._seal(ledger).encode()):
            raise PdslError(
                f"{where}: something was changed in it, so what was spent is not known; restore it, or start anew"
            )

    def _seal(self, ledger: Ledger) -> str:
        return _code(self.secret, json.dumps([dict(self.digests), ledger.to_json()]))


def _code(secret: bytes, text: str) -> str:
    """A code that only the secret's owner can compute: of records, it is no way to find out which they are."""
    return hmac.digest(secret or b"seeded", text.encode(), "sha256").hex()


def settings_digest(settings: Mapping[str, Any], besides: Sequence[str]) -> str:
    """Digest of nested settings but those named `besides`, as section.name or name."""
    tied = {name: value for name, value in flat(settings).items() if name not in besides}
    return hashlib.sha256(json.dumps(tied, sort_keys=True).encode()).hexdigest()


def tensors_digest(tensors: Iterable[Tensor]) -> str:
    """Digest of values, shapes and order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def graph_digest(graph: Graph) -> str:
    arrays = (graph.receiver, graph.sender, graph.omega)
    return tensors_digest(torch.as_tensor(array) for array in arrays)


def model_digest(module: nn.Module) -> str:
    """Digest of a module's structure, weights and buffers, and of the files that hold its classes' code."""
    tensors = tensors_digest([*module.parameters(), *module.buffers()])
    return hashlib.sha256(f"{module} {tensors} {code_digest({type(m) for m in module.modules()})}".encode()).hexdigest()


def code_digest(classes: Iterable[type]) -> str:
    """Digest of the source files of classes that are neither torch's nor ours; of their names where there is none."""
    own = [c for c in classes if c.__module__.partition(".")[0] not in ("torch", "pdsl")]
    return hashlib.sha256("\n".join(sorted(_code_of(c) for c in own)).encode()).hexdigest()


def _code_of(kind: type) -> str:
    name = f"{kind.__module__}.{kind.__qualname__}"
    try:
        file = inspect.getsourcefile(kind)
        return f"{name} {hashlib.sha256(Path(file or '').read_bytes()).hexdigest()}"
    except (OSError, TypeError):
        return name  # typed into an interpreter: there is no file that could change


def noise_digest(mechanisms: Sequence[Mechanism] | None) -> str:
    text = json.dumps([asdict(m) for m in mechanisms or ()])
    return hashlib.sha256(text.encode()).hexdigest()


def software() -> str:
    """Versions that decide how a message is rounded."""
    return f"pdsl {version('pdsl')}, torch {torch.__version__}, {sys.byteorder}-endian"
