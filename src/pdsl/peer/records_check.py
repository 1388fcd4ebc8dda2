"""Check that an organisation's records are the same in all rounds of a plan.

The ledger states one ε for one set of records. Records that arrive later belong into a new plan. The digest is keyed
with random bytes and private to the owner, so it does not help to guess records.
"""

import hmac
import secrets
from pathlib import Path

from pdsl.data.validation import Records
from pdsl.peer.ledger import PeerLedger
from pdsl.utils.errors import PdslError
from pdsl.utils.files import PRIVATE, read_private, write_whole
from pdsl.utils.inputs import tensors_digest

FILE = "records.digest"
SALT_BYTES = 32


def check_records(run: Path, data: Path, records: Records, ledger: PeerLedger) -> None:
    """PdslError if records changed after the first charge. Without a digest of them, it is written now."""
    digest, path = tensors_digest([records.x, records.y]).encode(), run / FILE
    if ledger.charges and path.exists():
        stored = read_private(path)
        salt, code = stored[:SALT_BYTES], stored[SALT_BYTES:]
        if not hmac.compare_digest(hmac.digest(salt, digest, "sha256"), code):
            raise PdslError(
                f"{data} has other records than in the rounds charged so far, and a ledger is for one set of records;"
                " restore the file, and use new records in a new plan"
            )
        return
    salt = secrets.token_bytes(SALT_BYTES)
    write_whole(path, salt + hmac.digest(salt, digest, "sha256"), PRIVATE)
