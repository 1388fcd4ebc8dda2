"""Statements of peers that lose neighbours or measure nothing, and the public part of an experiment."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pdsl.engine import LocalEngine
from pdsl.peer.engine import PeerEngine
from pdsl.peer.experiment import agreed_mechanisms, build_experiment, build_network, build_public_experiment
from pdsl.peer.membership import join
from pdsl.peer.plan import Timeouts
from pdsl.peer.statement import STATEMENT
from pdsl.peer.transport import Loop
from tests.helpers.organisations import make_organisations, make_plan, write_digits
from tests.peer.test_runner import KEY, run_all

pytestmark = pytest.mark.peer

QUICK = Timeouts(silence=10.0, deadline=30.0, start=30.0)


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def test_a_lost_neighbour_is_not_credited_with_the_own_message(
    tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cleo is lost in every round after the models were exchanged: her sums stay empty."""
    members = make_organisations(tmp_path, 3)
    _, task = write_digits(members)
    plan = make_plan(members, task, QUICK, graph={"kind": "full"})
    for member in members:
        join(member, plan)
    exchange = PeerEngine._exchange

    def lose(engine: PeerEngine, rows: dict[int, Tensor], own: Tensor) -> Tensor:
        received = exchange(engine, rows, own)
        if engine.agents.start == 0 and engine._phase == 2:  # the gradients have arrived
            engine.lost[2] = 1
            received[engine.sender.tolist().index(2)] = own
        return received

    monkeypatch.setattr(PeerEngine, "_exchange", lose)
    run_all(members, loop)
    values = json.loads((members[0].folder / "run" / STATEMENT).read_bytes())
    own, ben, cleo = values["parties"]
    assert (own["rounds"], ben["rounds"], cleo["rounds"]) == (3, 3, 0)
    assert np.any(ben["sums"]) and not np.any(cleo["sums"])


def test_an_algorithm_without_measurements_makes_no_statement(tmp_path: Path, loop: Loop) -> None:
    members = make_organisations(tmp_path, 3)
    _, task = write_digits(members)
    plan = make_plan(members, task, QUICK, algorithm={"name": "d-psgd"})
    for member in members:
        join(member, plan)
    assert [summary["statement"] for summary in run_all(members, loop)] == [None] * 3
    assert not (members[0].folder / "run" / STATEMENT).exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"data": {"scale": "public"}},
        {"public": {"features": "scattering", "start": "labels"}, "model": {"name": "linear"}},
        {"model": {"name": "mlp"}, "algorithm": {"learning_rate": 0.5}},
    ],
)
def test_the_public_part_of_an_experiment_is_that_of_a_peer(tmp_path: Path, settings: dict[str, Any]) -> None:
    members = make_organisations(tmp_path, 2)
    _, task = write_digits(members)
    scaled = settings.pop("data", {}).get("scale", "none")
    plan = make_plan(members, task.model_copy(update={"scale": scaled}), QUICK, graph={"kind": "full"}, **settings)
    own = members[1]
    network, mechanism = build_network(plan, None, own.folder), agreed_mechanisms(plan)[1]
    peer = build_experiment(own, plan, network, KEY, 1, mechanism, LocalEngine)
    (own.folder / "data.npz").unlink()
    found = build_public_experiment(plan, own.folder)
    assert found.learning_rates == peer.learning_rates
    assert torch.equal(found.network.initial_parameters(), peer.network.initial_parameters())
    assert all(torch.equal(a, b) for a, b in zip(found.validation, peer.validation, strict=True))
    assert found.sigma == peer.sigma and found.sigma_scale == peer.sigma_scale
