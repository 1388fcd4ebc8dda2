"""Receipts: proof for a peer, kept by its neighbours, of the last round in which it sent noisy vectors.

Every message carries a proof of the last such round and of the number of charges in the ledger at that time, which only
the holder of the sender's private key can make. Neighbours return the newest one with each call. A proof of a round or
of charges that the ledger does not have, or of vectors that the noise log does not know, means that the folder is an
older copy. A neighbour cannot forge a proof, so it cannot stop a peer with it.

The key of the proofs is derived from the private key at first, and kept in `receipts.key`. It stays the same if the
organisation renews its key or moves to another machine, so that older copies are found out then, too.
"""

import hashlib
import hmac
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from pdsl.peer.ledger import PeerLedger
from pdsl.peer.messages import HASH, Receipt
from pdsl.utils.errors import PdslError
from pdsl.utils.files import PRIVATE, read_private, write_whole

FILE, KEY_FILE = "receipts.json", "receipts.key"


class Receipts:
    """Receipts of one peer: those that it holds for its neighbours, and the newest of its own that it was shown."""

    def __init__(self, key: bytes, plan: str, neighbours: Iterable[int], path: Path):
        self._key = _load_key(path.with_name(KEY_FILE), key)
        self._plan, self._path = plan, path
        self.held: dict[int, Receipt] = dict.fromkeys(neighbours, Receipt())
        self.held |= self._load()
        self.charges = 0  # in the ledger now
        self.released_round = self._released_charges = 0  # when this process last sent noisy vectors
        self.proven_round = self.proven_charges = 0  # of any process, according to proofs that neighbours returned

    def note_release(self, t: int) -> None:
        """Note that noisy vectors of round t can leave."""
        self.released_round, self._released_charges = t, self.charges

    def attach(self, j: int) -> bytes:
        """Receipt for neighbour j, to precede a message."""
        t, charges = self.released_round, self._released_charges
        return t.to_bytes(4, "big") + charges.to_bytes(4, "big") + self._prove(j, t, charges)

    def check(self, j: int, receipt: Receipt) -> None:
        """Note a proof that neighbour j returned, if it is genuine."""
        t, charges, proof = receipt
        newer = t > self.proven_round or charges > self.proven_charges
        if newer and hmac.compare_digest(self._prove(j, t, charges).hex(), proof):
            self.proven_round, self.proven_charges = max(t, self.proven_round), max(charges, self.proven_charges)

    def keep(self, j: int, receipt: Receipt, last: int) -> None:
        """Keep the newest receipt of neighbour j, of a round up to `last`."""
        if self.held[j][:2] < receipt[:2] and receipt.round <= last:
            self.held[j] = receipt

    def _prove(self, j: int, t: int, charges: int) -> bytes:
        return hmac.digest(self._key, f"{self._plan}/{j}/{t}/{charges}".encode(), "sha256")

    def save(self) -> None:
        if not (key_file := self._path.with_name(KEY_FILE)).exists():
            write_whole(key_file, self._key, PRIVATE)
        content = {"plan": self._plan, "receipts": {str(j): list(receipt) for j, receipt in self.held.items()}}
        write_whole(self._path, json.dumps(content).encode())

    def _load(self) -> dict[int, Receipt]:
        """Load the receipts of an earlier process; without a usable file, neighbours send new ones."""
        try:
            stored = json.loads(self._path.read_bytes())
            if stored["plan"] != self._plan:
                return {}
            found = {int(j): Receipt(int(t), int(n), str(proof)) for j, (t, n, proof) in stored["receipts"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}
        return {j: r for j, r in found.items() if j in self.held and HASH.fullmatch(r.proof)}


def _load_key(path: Path, private: bytes) -> bytes:
    """Load the key of the proofs, or derive it from the private key; it is written with the first receipts."""
    if path.exists():
        return read_private(path)
    return hashlib.sha256(b"pdsl receipts\0" + private).digest()


def check_copy(folder: Path, receipts: Receipts, ledger: PeerLedger, has_vectors: Callable[[int], bool]) -> None:
    """Refuse an older copy of a folder.

    `has_vectors` tells whether an earlier process has logged vectors of a round.
    """
    proven, last = receipts.proven_round, ledger.last_round
    unknown = receipts.released_round == 0 < proven == last and not has_vectors(last)
    if proven > last or receipts.proven_charges > len(ledger.charges) or unknown:
        raise PdslError(
            f"{folder} is an older copy: neighbours have proof that messages of round {proven} were sent from a newer"
            f" one, and its ledger lacks them; restore the newest copy, or charge the lost rounds: pdsl peer recover"
            f" {folder}"
        )
