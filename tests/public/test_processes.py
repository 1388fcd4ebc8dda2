"""Features and start over several processes: ranks of one run, and peers."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import pdsl
from pdsl.engine import LocalEngine
from pdsl.peer.experiment import build_experiment, build_network
from pdsl.peer.identity import Identity
from pdsl.peer.plan import TrainingPlan
from pdsl.peer.runner import run
from pdsl.peer.transport import Loop
from pdsl.training.experiment import prepare
from tests.helpers.organisations import make_organisations, make_plan, write_digits
from tests.helpers.ranks import outcomes
from tests.helpers.refusals import refused
from tests.peer.test_runner import QUICK, combined_sha256, join_all, simulate, use_test_key

PUBLIC: dict[str, Any] = {
    "features": "patches",
    "patch": 3,
    "pool": 2,
    "filters": 20,
    "components": 30,
    "start": "labels",
}


@pytest.mark.slow
def test_two_ranks_end_with_the_models_of_one_process(tmp_path: Path) -> None:
    values = {
        "rounds": 3,
        "graph": {"kind": "ring", "agents": 4},
        "data": {"validation": 80},
        "public": PUBLIC,
        "engine": {"workers": 1},
    }
    ((alone,), (together,)) = (outcomes(size, [values], tmp_path) for size in (0, 2))
    assert together["sha256"] == alone["sha256"]
    assert [row["loss"] for row in together["rows"]] == [row["loss"] for row in alone["rows"]]


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def planned(members: list[Identity], **public: Any) -> tuple[TrainingPlan, Any]:
    data, task = write_digits(members)
    return make_plan(members, task, QUICK, model={"name": "linear"}, public={**PUBLIC, **public}), data


@pytest.mark.slow
@pytest.mark.peer
def test_peers_with_features_and_start_have_the_models_of_a_simulation(
    tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_test_key(monkeypatch)
    members = make_organisations(tmp_path, 3)
    plan, data = planned(members)
    join_all(members, plan)
    with ThreadPoolExecutor(len(members)) as pool:
        summaries = list(pool.map(lambda member: run(member, loop), members))
    assert combined_sha256(summaries) == simulate(plan, data).models_sha256
    assert all("for features, start" in summary["privacy"] for summary in summaries)
    files = [load_file(member.folder / "run" / "features.safetensors") for member in members]
    for other in files[1:]:
        assert all(torch.equal(tensor, other[name]) for name, tensor in files[0].items())
    loaded = pdsl.load(members[0].folder / "run")
    raw = data.test_x[:50]
    assert loaded.predict(raw).shape == (50,)


@pytest.mark.peer
def test_the_experiment_of_a_peer_starts_like_a_simulation(tmp_path: Path) -> None:
    members = make_organisations(tmp_path, 2)
    plan, data = planned(members)
    simulated = prepare(
        plan.config.model_copy(update={"batch": plan.config.batch.model_copy(update={"records": plan.task.records})}),
        data=data,
        graph=plan.graph,
    )
    assert simulated.mechanisms is not None
    network = build_network(plan)
    e = build_experiment(members[1], plan, network, bytes(32), 0, simulated.mechanisms[1], LocalEngine)
    assert torch.equal(e.network.initial_parameters(), simulated.network.initial_parameters())
    assert not torch.equal(e.network.initial_parameters(), network.initial_parameters())
    assert e.public.as_dict() == simulated.public.as_dict()
    assert torch.equal(e.data.x, simulated.data.x[simulated.parts[1]])  # type: ignore[arg-type]
    assert torch.equal(e.validation[1], simulated.validation[1])
    assert e.learning_rates == simulated.learning_rates


@pytest.mark.parametrize(
    ("public", "inputs"),
    [({}, 30), ({"components": 0}, 2 * 20 * 4), ({"components": 5000}, 2 * 20 * 4), ({"features": "none"}, 64)],
)
def test_the_plan_determines_the_number_of_features(tmp_path: Path, public: dict[str, Any], inputs: int) -> None:
    plan, _ = planned(make_organisations(tmp_path, 2), **public)
    assert build_network(plan).num_parameters == 10 * inputs


@pytest.mark.parametrize(
    ("features", "reason"),
    [("tests.public.maps:random_features", "do not name the same code"), ("model", "frozen first layers")],
)
def test_a_plan_with_a_map_that_members_cannot_agree_on_is_refused(tmp_path: Path, features: str, reason: str) -> None:
    members = make_organisations(tmp_path, 2)
    with refused("plan: ", reason):
        planned(members, features=features)
