"""The record of a round: one line of rows.jsonl."""

from typing import Required, TypedDict


class ShapleyRecord(TypedDict, total=False):
    """Shapley values of a round; the lists have one number per edge, in the order of `edges` in setup.json.

    On a schedule these are the edges of all rounds, and None means that the edge is not in this round's graph.
    """

    phi: list[float | None]  # value of each message to its receiver
    share: list[float | None]  # weight of each message
    estimator: str
    coalitions: int  # coalitions that were evaluated
    spread: float
    fidelity: float  # correlation of 'fast' values with those of true models, in rounds that check it


class RoundRecord(TypedDict, total=False):
    """Measurements of one round. Algorithms may add keys of their own; accuracies and losses are there if evaluated."""

    round: Required[int]
    consensus: float  # mean distance of the models from their mean
    messages: int  # vectors sent
    bytes: int
    bytes_between_processes: int
    accuracy: float  # mean over agents, on the test set
    accuracy_min: float
    accuracy_max: float
    accuracy_of_mean: float
    loss: float | None  # None where it is not finite
    loss_min: float | None
    loss_max: float | None
    epsilon: float | None  # total of the worst agent up to this round
    shapley: ShapleyRecord
    implausible: list[int] | list[str]  # senders of a row that robust mixing found too far away; peers: their names
    # between peers
    absent: bool  # the peer missed the round; the record has no measurements
    present: list[str]  # neighbours that took part
    shortened: list[str]  # neighbours whose message was longer than an honest one could be
    lost: dict[str, int]  # neighbours that were lost during the round, with the phase
    seconds: float
    waited: float  # seconds spent waiting for neighbours
