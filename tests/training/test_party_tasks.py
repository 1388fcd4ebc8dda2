"""Benchmarks of contributions at party level, against results by hand."""

import importlib.util
import sys

import numpy as np
import pytest
import torch

from benchmarks import contributions, party_tasks
from benchmarks.party_tasks import BAD, count_below, load_experiment, random_curve, removal_curve
from pdsl.attacks import find_victim


def test_pairs_with_a_lower_bad_party_are_counted_and_ties_count_half() -> None:
    values = np.array([0.1, 0.5, 0.2, 0.5])
    assert count_below(values, [0]) == 1.0
    assert count_below(values, [1]) == pytest.approx((0 + 0 + 0.5) / 3)
    assert count_below(values, []) is None


def test_a_removal_curve_has_the_accuracies_of_the_remaining_subsets() -> None:
    accuracy = np.arange(64) / 64  # of the subset with this bit mask
    assert removal_curve([5, 0, 3, 1, 2, 4], accuracy) == [0b011111 / 64, 0b011110 / 64, 0b010110 / 64]


def test_the_random_curve_is_the_mean_over_subsets_of_equal_size() -> None:
    accuracy = np.array([subset.bit_count() / 6 for subset in range(64)])
    assert random_curve(accuracy) == pytest.approx([5 / 6, 4 / 6, 3 / 6])


@pytest.mark.parametrize(("kind", "part"), [("label_noise_20", 0.2), ("label_noise_40", 0.4)])
def test_label_noise_changes_this_part_of_the_labels_of_bad_parties_only(kind: str, part: float) -> None:
    clean, _ = load_experiment(("free_rider", "none", 0))
    e, bad = load_experiment((kind, "none", 0))
    assert bad == list(BAD)
    for j, own in enumerate(e.parts):
        assert torch.equal(own, clean.parts[j])
        changed = float((e.data.y[own] != clean.data.y[own]).double().mean())
        assert changed == (pytest.approx(part, abs=0.1) if j in BAD else 0)
    assert torch.equal(e.data.x, clean.data.x)


def test_feature_noise_has_standard_deviation_one_in_bad_parties_only() -> None:
    clean, _ = load_experiment(("free_rider", "none", 0))
    e, _ = load_experiment(("feature_noise", "none", 0))
    for j, own in enumerate(e.parts):
        noise = float((e.data.x[own] - clean.data.x[own]).std())
        assert noise == (pytest.approx(1.0, abs=0.05) if j in BAD else 0)
    assert torch.equal(e.data.y, clean.data.y)


def test_free_riders_have_no_true_records_and_a_duplicate_has_those_of_its_victim() -> None:
    e, (rider, other) = load_experiment(("free_rider", "none", 0))
    sizes = [len(labels) for _, labels in contributions.true_records(e)]
    assert sizes == [0 if j in (rider, other) else len(part) for j, part in enumerate(e.parts)]
    e, (copy,) = load_experiment(("duplicate", "none", 0))
    records = contributions.true_records(e)
    victim = find_victim(e.attackers, e.graph, copy)
    assert all(torch.equal(a, b) for a, b in zip(records[copy], records[victim], strict=True))


def test_without_river_the_benchmark_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["contributions", "segment"])
    with pytest.raises(SystemExit) as stopped:
        contributions.main()
    assert stopped.value.code == 2
    assert "pip install --no-deps river" in capsys.readouterr().err


def test_every_kind_has_its_bad_parties() -> None:
    for kind in party_tasks.KINDS:
        _, bad = load_experiment((kind, "none", 1))
        assert len(bad) == (0 if kind == "clean" else 1 if kind == "duplicate" else 2)
