"""Records: where they come from, who holds them, and which of them a round uses.

Read `datasets` first (what a data set is, the public ones, and the public set Q), then `files` (where their files are,
and how they are checked and fetched), `own` and `records` (the user's own data, and what they must be), `partition`
(records to agents) and `batches` (an agent's records to a round).
"""

from pdsl.data.batches import Batches, public_records
from pdsl.data.datasets import Data, load, split_public
from pdsl.data.files import Status, data_root, fetch, status
from pdsl.data.own import from_python
from pdsl.data.partition import label_counts, partition

__all__ = [
    "Batches",
    "Data",
    "Status",
    "data_root",
    "fetch",
    "from_python",
    "label_counts",
    "load",
    "partition",
    "public_records",
    "split_public",
    "status",
]
