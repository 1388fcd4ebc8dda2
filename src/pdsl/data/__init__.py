"""Data: loading, validation, partition across agents, and sampling of batches.

Read `datasets` first (the `Data` container, built-in data sets and the public set Q), then `download` (their files),
`custom` (objects from Python) with `tables`, `items` and `huggingface`, `files` (npz, CSV, Parquet), `validation` and
`targets` (checks and conversion), `scaling`, `partition` (records to agents) and `sampling` (batches).
"""

from pdsl.data.custom import from_python
from pdsl.data.datasets import Data, load, split_public, standardise
from pdsl.data.download import Status, data_root, fetch, status
from pdsl.data.files import data_path
from pdsl.data.partition import label_counts, partition
from pdsl.data.sampling import Batches, public_records
from pdsl.data.scaling import Scaling

__all__ = [
    "Batches",
    "Data",
    "Scaling",
    "Status",
    "data_path",
    "data_root",
    "fetch",
    "from_python",
    "label_counts",
    "load",
    "partition",
    "public_records",
    "split_public",
    "standardise",
    "status",
]
