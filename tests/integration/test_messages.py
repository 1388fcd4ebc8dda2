"""Messages that a new user meets: each says what to do, at the user's own line."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdsl
from pdsl.callbacks import EarlyStopping
from tests.helpers.refusals import refused

N, LENGTH, WORDS = 120, 6, 20
SHORT: dict[str, Any] = {"rounds": 1, "graph": {"kind": "full", "agents": 3}, "partition": "iid"}


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, a mask that is true for padding at the end, and labels."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, WORDS, (N, LENGTH), generator=generator)
    lengths = torch.randint(3, LENGTH + 1, (N, 1), generator=generator)
    return ids, torch.arange(LENGTH) >= lengths, torch.arange(N) % 2


class Encoder(nn.Module):
    def __init__(self, batch_first: bool = True, branches: bool = False):
        super().__init__()
        self.branches = branches
        self.embedding = nn.Embedding(WORDS, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first)
        self.head = nn.Linear(8, 2)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        padding = None if mask is None else mask.bool()
        if self.branches and padding is not None and padding.any():
            ids = ids + 0
        return self.head(self.encoder(self.embedding(ids), src_key_padding_mask=padding)[:, 0])  # type: ignore[no-any-return]


class Quadratic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(20, 300) / 100)
        self.head = nn.Linear(300, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x @ self.matrix)  # type: ignore[no-any-return]


def collect_warnings(model: nn.Module, data: object, **settings: Any) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pdsl.train(model, data, **{**SHORT, **settings})
    return caught


def slow(caught: list[warnings.WarningMessage]) -> list[warnings.WarningMessage]:
    return [warning for warning in caught if "per-record" in str(warning.message)]


def test_a_padding_mask_of_a_transformer_is_not_slow() -> None:
    ids, mask, y = tokens()
    assert not slow(collect_warnings(Encoder(), ((ids, mask), y)))


def test_slow_code_is_named_at_the_line_of_the_user() -> None:
    ids, mask, y = tokens()
    (warning,) = slow(collect_warnings(Encoder(branches=True), ((ids, mask), y)))
    assert "code of Encoder" in str(warning.message)
    assert "torch.where" in str(warning.message)
    assert "pytorch" not in str(warning.message)
    assert Path(warning.filename).name == Path(__file__).name


def test_slow_parameters_are_named_with_their_module_and_a_remedy() -> None:
    (warning,) = slow(collect_warnings(Quadratic(), (torch.randn(N, 20), torch.arange(N) % 2)))
    assert "gradients of matrix are" in str(warning.message)
    assert "no formula for Quadratic; use standard layers" in str(warning.message)


def test_layers_with_time_first_are_pointed_to_batch_first() -> None:
    ids, _, y = tokens()
    with refused("mixes records", "batch_first=True"):
        pdsl.train(Encoder(batch_first=False), (ids, y), **SHORT)


def test_a_token_without_a_row_is_no_matter_of_floats() -> None:
    ids, _, y = tokens()
    with refused(f"nn.Embedding of {WORDS} rows"):
        pdsl.train(Encoder(), (ids + WORDS, y), **SHORT)


def test_held_out_records_are_avoided_by_test_data() -> None:
    x, y = torch.randn(N, 4), torch.arange(N) % 2
    notes = [str(w.message) for w in collect_warnings(nn.Linear(4, 2), (x, y))]
    assert any("give test data: (data, test data)" in note for note in notes)
    assert not any("held out" in str(w.message) for w in collect_warnings(nn.Linear(4, 2), ((x, y), (x, y))))


def test_a_graph_of_another_size_names_the_owners() -> None:
    part = torch.randn(40, 4), torch.arange(40) % 2
    with refused("graph.agents: 4", "3 agents (aachen, bonn, celle)", "pdsl.ring(3)"):
        pdsl.train(nn.Linear(4, 2), dict.fromkeys(("aachen", "bonn", "celle"), part), graph=pdsl.ring(4))


def test_an_argument_of_another_early_stopping_names_the_right_one() -> None:
    with refused("no argument mode", "higher_is_better"):
        EarlyStopping("accuracy", mode="max")  # type: ignore[arg-type]


@pytest.mark.parametrize(("rounds", "said"), [(1, "over 1 round ("), (2, "over 2 rounds (")])
def test_a_statement_counts_in_words(rounds: int, said: str) -> None:
    result = pdsl.train(algorithm="muffliato", graph={"kind": "ring", "agents": 4}, rounds=rounds)
    assert said in result.summary["privacy"]
    assert "up to 1 message a round" in result.summary["privacy"]
