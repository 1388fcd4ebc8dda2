"""What ties a ledger to its run: the settings, the records and the secret that it was opened with.

Noise that was drawn once must not be added to anything else, and what was charged must be what is sent. So a run goes
on only as the run that it was: what it computes with is compared by digests that stand in its ledger, and the ledger
itself has a code under the run's secret, which somebody who changes what is charged cannot make anew.
"""

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pdsl.errors import PdslError
from pdsl.privacy.ledger import Ledger
from pdsl.settings import flat

TIED, SEAL = "tied_to", "seal"


@dataclass(frozen=True)
class Bond:
    settings: str  # digests
    records: str
    device: str  # another one rounds differently, and would not send the same bytes again
    secret: bytes = field(repr=False)  # nothing where noise is seeded, and nobody's secret

    def sealed(self, ledger: Ledger, costs: bool = False) -> str:
        """The ledger for its file."""
        return ledger.to_json(costs, {TIED: self._digests, SEAL: self._code(ledger)})

    def check(self, ledger: Ledger, text: str, where: str) -> None:
        """PdslError unless the ledger in the text is one that was opened with the same, and nobody else wrote in it."""
        stored = json.loads(text)
        tied = stored.get(TIED)
        if not isinstance(tied, dict):
            raise PdslError(
                f"{where} is not tied to its run, as those of earlier versions are not, so what was spent is not known;"
                " start the run anew"
            )
        names = {
            "settings": "config.toml does not have the settings (or this version of pdsl has others)",
            "records": "the data do not have the records",
            "device": "engine.device is not the one",
            "secret": "secret.key is not the one",
        }
        for name, digest in self._digests.items():
            if tied.get(name) != digest:
                raise PdslError(
                    f"{where}: {names[name]} that the run was begun with, and its noise is for no other; restore"
                    " them, or start the run anew"
                )
        if not hmac.compare_digest(str(stored.get(SEAL)).encode(), self._code(ledger).encode()):
            raise PdslError(
                f"{where}: something was changed in it, so what was spent is not known; restore it, or start anew"
            )

    @property
    def _digests(self) -> dict[str, str]:
        return {
            "settings": self.settings,
            "records": self.records,
            "device": self.device,
            "secret": hashlib.sha256(self.secret).hexdigest(),
        }

    def _code(self, ledger: Ledger) -> str:
        content = json.dumps([self._digests, ledger.to_json()])
        return hmac.digest(self.secret or b"seeded", content.encode(), "sha256").hex()


def settings_digest(settings: Mapping[str, Any], besides: Sequence[str]) -> str:
    """Of nested settings but those named `besides`, as section.name or name."""
    tied = {name: value for name, value in flat(settings).items() if name not in besides}
    return hashlib.sha256(json.dumps(tied, sort_keys=True).encode()).hexdigest()


def records_digest(*tensors: Tensor) -> str:
    """Of everything that a run computes from: values, shapes and order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()
