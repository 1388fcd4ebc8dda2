"""Data: loading, validation, partition across agents, and sampling of batches.

Read `datasets` first (the `Data` container, built-in data sets and the public set Q), then `download` (their files),
`custom` and `validation` (custom data and its checks), `partition` (records to agents) and `sampling` (batches).
"""

from pdsl.data.custom import from_python
from pdsl.data.datasets import Data, load, split_public
from pdsl.data.download import Status, data_root, fetch, status
from pdsl.data.partition import label_counts, partition
from pdsl.data.sampling import Batches, public_records

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
