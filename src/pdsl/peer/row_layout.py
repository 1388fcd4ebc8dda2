"""Shapley values of rows when an amendment has changed the neighbourhood: one place for each neighbour of any stage.

The values of a round are `null` for members that were no neighbours in it. A row lists the members of its places unless
they are the neighbourhood in the plan.
"""

from collections.abc import Mapping, Sequence
from typing import cast

from pdsl.peer.ledger import PeerLedger
from pdsl.training.records import RoundRecord
from pdsl.utils.types import JsonDict

VALUES = ("phi", "share")


def find_members(ledger: PeerLedger) -> list[int]:
    """Members of the neighbourhood in any stage so far, ascending."""
    return sorted({*ledger.members, *(j for stage in ledger.past for j in stage.members)})


def spread_values(shapley: JsonDict, present: Sequence[int], ledger: PeerLedger, planned: Sequence[int]) -> JsonDict:
    """Shapley values with a place for each member of any stage: 0 for absent neighbours, None for others."""
    neighbourhood = dict.fromkeys(ledger.members, 0.0)
    values = {name: {**neighbourhood, **dict(zip(present, shapley[name], strict=True))} for name in VALUES}
    return _arrange(shapley, values, find_members(ledger), planned)


def arrange_row(row: RoundRecord, planned: Sequence[int], members: Sequence[int]) -> RoundRecord:
    """The row with Shapley values of all `members`. A row without a list of members has those of the plan."""
    shapley = cast(JsonDict | None, row.get("shapley"))
    if shapley is None:
        return row
    before = shapley.get("members", planned)
    values = {name: dict(zip(before, shapley[name], strict=True)) for name in VALUES}
    return cast(RoundRecord, {**row, "shapley": _arrange(shapley, values, members, planned)})


def _arrange(
    shapley: JsonDict, values: Mapping[str, Mapping[int, float]], members: Sequence[int], planned: Sequence[int]
) -> JsonDict:
    listed = {} if list(members) == list(planned) else {"members": list(members)}
    return {**shapley, **{name: [of.get(j) for j in members] for name, of in values.items()}, **listed}
