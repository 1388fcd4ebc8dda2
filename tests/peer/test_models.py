"""Own models, losses and features between organisations: as data in the plan, or as installed code."""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pdsl as package
from pdsl.data import Data
from pdsl.models import architecture
from pdsl.peer.experiment import check_budget, describe_task
from pdsl.peer.identity import WEIGHTS, Identity
from pdsl.peer.model_export import export_model
from pdsl.peer.plan import TaskDescription, Timeouts, TrainingPlan, compose
from pdsl.peer.runner import run
from pdsl.peer.transport import Loop
from pdsl.settings import EngineSettings
from pdsl.training.evaluation import final_evaluation
from pdsl.training.experiment import prepare
from pdsl.training.trainer import rounds
from pdsl.utils.errors import PdslError
from tests.helpers.commands import pdsl
from tests.helpers.organisations import make_organisations, write_digits
from tests.helpers.refusals import refused
from tests.models.test_architecture import Mutator
from tests.peer.test_runner import KEY, combined_sha256, join_all, run_all, use_test_key

pytestmark = pytest.mark.peer
QUICK = Timeouts(silence=2.0, deadline=20.0, start=20.0)
SETTINGS = ["rounds=3", "graph.kind=full", "privacy.target_epsilon=8"]
CODE = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))

def quantile(outputs, targets):
    error = (targets - 100) / 20 - outputs[:, 0]
    return torch.maximum(0.9 * error, -0.1 * error)

def coverage(outputs, targets):
    return float((targets < 100 + 20 * outputs[:, 0]).double().mean())

def squares(x):
    return torch.cat([x, x * x], dim=1)
"""


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of the members, found on the path; importing its top level leaves a trace."""
    folder = tmp_path / "site" / "clinic_models"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'imported')!r}).touch()\n")
    (folder / "nets.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield folder
    for name in [name for name in sys.modules if name.startswith("clinic_models")]:
        del sys.modules[name]


def backbone_with_head() -> nn.Sequential:
    """A frozen convolution with normalisation and a residual block, and a head to train."""
    torch.manual_seed(1)
    norm = nn.BatchNorm2d(8)
    norm.running_mean = torch.full((8,), 0.1)
    frozen = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), norm, nn.ReLU(), package.Residual(nn.Conv2d(8, 8, 1)))
    return nn.Sequential(*frozen.requires_grad_(False), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10))


def write_numbers(members: list[Identity]) -> tuple[Data, TaskDescription]:
    """Write a regression task to the members' folders."""
    generator = torch.Generator().manual_seed(0)
    x = 3 + 2 * torch.randn(340, 5, generator=generator)
    y = 100 + 10 * (x @ torch.randn(5, generator=generator))
    for i, member in enumerate(members):
        np.savez(member.folder / "data.npz", x=x[40 + i :: 3].numpy(), y=y[40 + i :: 3].numpy())
        arrays = {"x_test": x[:20], "y_test": y[:20], "x_validation": x[20:40], "y_validation": y[20:40]}
        np.savez(member.folder / "public.npz", **{name: part.numpy() for name, part in arrays.items()})
    task = describe_task(members[0].folder / "public.npz", 100, None)
    owner = torch.arange(300) % 3
    return Data("npz", x[40:], y[40:], x[:20], y[:20], 0, owner, (x[20:40], y[20:40])), task


def make(
    members: list[Identity], task: TaskDescription, settings: list[str], module: nn.Module | None = None
) -> TrainingPlan:
    """A plan from settings, joined by all; an own model travels as layers and weights."""
    exported = None if module is None else export_model(module)
    cards = [member.card for member in members]
    plan = compose(
        cards, None, [*SETTINGS, *settings], task, QUICK, None if exported is None else exported.settings, "ada"
    )
    plan = TrainingPlan.parse(plan.to_toml().encode(), "mail")
    check_budget(plan)
    for member in members:
        if exported is not None:
            (member.folder / WEIGHTS).write_bytes(exported.weights)
    join_all(members, plan)
    return plan


def simulate(plan: TrainingPlan, data: Data, module: nn.Module | None = None) -> str:
    """Hash of all models after a simulation of the plan in one process."""
    batch = plan.config.batch.model_copy(update={"records": plan.task.records})
    scaled = plan.config.data.model_copy(update={"scale": plan.task.scale})
    update = {"engine": EngineSettings(exact=True), "batch": batch, "data": scaled}
    e = prepare(plan.config.model_copy(update=update), data=data, graph=plan.graph, key=KEY, model=module)
    *_, last = rounds(e)
    return final_evaluation(e, last.state.x).models_sha256


@pytest.mark.parametrize("features", ["none", "model"])
def test_three_organisations_train_the_head_of_a_frozen_backbone(
    tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch, features: str
) -> None:
    use_test_key(monkeypatch)
    members, module = make_organisations(tmp_path, 3), backbone_with_head()
    data, task = write_digits(members)
    settings = [f"public.features={features}", "public.components=0", "rounds=6"]
    plan = make(members, task, settings, module)
    summaries = run_all(members, loop)
    assert combined_sha256(summaries) == simulate(plan, data, module)
    assert min(summary["accuracy"] for summary in summaries) > 0.5
    assert json.loads((members[0].folder / "run/setup.json").read_text())["parameters"] == 1290

    loaded = package.load(members[0].folder / "run")  # needs no code: the layers are in the model's file
    x = torch.randn(4, 1, 8, 8)
    assert loaded.model(x).shape == (4, 10)
    frozen = [p for p in loaded.model.parameters() if p.shape == (8, 1, 3, 3)]
    assert torch.equal(frozen[0], module[0].weight)


def test_three_organisations_learn_numbers_with_their_own_network_and_standardised_inputs(
    tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_test_key(monkeypatch)
    members = make_organisations(tmp_path, 3)
    data, task = write_numbers(members)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), package.Residual(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 1))
    settings = ["data.scale=public", "batch.rate=1.0", "batch.size=100", "rounds=12"]
    plan = make(members, task, settings, module)
    assert plan.task.scale == "public"
    summaries = run_all(members, loop)
    assert combined_sha256(summaries) == simulate(plan, data, module)
    assert all(summary["rmse"] < float(data.test_y.std()) for summary in summaries)


def test_class_weights_and_scale_of_the_public_set_are_the_same_for_all_members(
    tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_test_key(monkeypatch)
    members = make_organisations(tmp_path, 3)
    data, task = write_digits(members)
    settings = ["task.class_weights=public", "task.label_smoothing=0.1", "model.name=mlp", "data.scale=public"]
    plan = make(members, task, settings)
    assert combined_sha256(run_all(members, loop)) == simulate(plan, data)


def test_a_text_model_with_an_embedding_trains_on_integers(tmp_path: Path, loop: Loop) -> None:
    members = make_organisations(tmp_path, 3)
    ids = np.random.default_rng(0).integers(0, 12, (160, 4))
    y = (ids[:, 0] > 5).astype(np.int64)
    for i, member in enumerate(members):
        np.savez(member.folder / "data.npz", x=ids[40 + i :: 3], y=y[40 + i :: 3])
        np.savez(
            member.folder / "public.npz", x_test=ids[:20], y_test=y[:20], x_validation=ids[:40], y_validation=y[:40]
        )
    task = describe_task(members[0].folder / "public.npz", 40, None)
    module = nn.Sequential(nn.Embedding(12, 4), nn.Flatten(), nn.Linear(16, 2))
    make(members, task, ["rounds=2"], module)
    assert all(summary["rounds_run"] == 2 for summary in run_all(members, loop))
    np.savez(members[0].folder / "data.npz", x=ids + 1, y=y)
    with refused("outside 0 to 11"):
        run(members[0], loop)


def test_own_loss_metric_model_and_features_run_from_the_installed_package(
    tmp_path: Path, loop: Loop, installed: Path
) -> None:
    members = make_organisations(tmp_path, 3)
    _, task = write_numbers(members)
    names = {"model.name": "make", "task.loss": "quantile", "task.metric": "coverage"}
    plan = make(members, task, ["data.scale=public", *(f"{key}=clinic_models.nets:{f}" for key, f in names.items())])
    assert plan.task_kind == "custom" and set(plan.sources) == {f"clinic_models.nets:{f}" for f in names.values()}
    summaries = run_all(members, loop)
    assert [summary["metric"] for summary in summaries] == ["loss"] * 3
    row = json.loads((members[0].folder / "run/rows.jsonl").read_text().splitlines()[-1])
    assert "coverage" in json.dumps(row)

    (installed / "nets.py").write_text(CODE + "# changed\n")
    with refused("installed source of clinic_models.nets:", "differs"):
        run(members[0], loop)


def test_own_features_run_from_the_installed_package(tmp_path: Path, loop: Loop, installed: Path) -> None:
    members = make_organisations(tmp_path, 3)
    _, task = write_numbers(members)
    make(members, task, ["public.features=clinic_models.nets:squares", "public.components=0", "model.name=linear"])
    summaries = run_all(members, loop)
    assert all(summary["rounds_run"] == 3 for summary in summaries)
    assert json.loads((members[0].folder / "run/setup.json").read_text())["parameters"] == 10


def test_reading_a_plan_imports_nothing_and_joining_needs_a_confirmation(
    tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    members = make_organisations(tmp_path, 3)
    _, task = write_numbers(members)
    settings = [*SETTINGS, "model.name=clinic_models.nets:make", "privacy.delta=0.5"]
    plan = compose([member.card for member in members], None, settings, task, QUICK, None, "Ada of Aachen")
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    assert TrainingPlan.read(tmp_path / "plan.toml") == plan
    ((path, digest),) = plan.sources.items()
    pdsl("peer", "join", "ada", "plan.toml").refused("read it", f"--code {digest[:16]}", str(installed))
    pdsl("peer", "join", "ada", "plan.toml", "--code", digest[:8]).refused("read it")
    assert not (tmp_path / "imported").exists() and not (members[0].folder / "plan.toml").exists()
    joined = pdsl("peer", "join", "ada", "plan.toml", "--code", digest[:16])
    assert (tmp_path / "imported").exists() and joined.code == 0
    for part in (digest, path, "Ada of Aachen", "43 parameters trained, 0 frozen", "regression", "WARNING: δ 0.5"):
        assert part in joined.out
    (installed / "nets.py").write_text(CODE + "# changed\n")
    pdsl("peer", "join", "ben", "plan.toml", "--code", digest[:16]).refused("differs from the plan's")


def test_invite_exports_a_model_and_join_prints_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    members = make_organisations(tmp_path, 3)
    write_digits(members)
    cards = [f"{member.card.name}/card.toml" for member in members]
    options = [option for setting in SETTINGS for option in ("--set", setting)]
    model = "tests.peer.test_models:backbone_with_head"
    invite = ["peer", "invite", *cards, "--public", "ada/public.npz", "--records", 100, *options]
    made = pdsl(*invite, "--model", model, "--author", "ada")
    assert made.code == 0 and "named weights.safetensors" in made.out and (tmp_path / WEIGHTS).exists()
    pdsl(*invite, "--model", model, "--set", "model.name=mlp").refused("both give a model")
    pdsl(*invite, "--model", "torch.nn:LSTM").refused("--model")
    joined = pdsl("peer", "join", "ada", "plan.toml")
    assert "copy weights.safetensors" in joined.out and "δ" in joined.out and "WARNING" not in joined.out
    for line in (
        "author ada (nothing proves it)",
        "model layers: 1,290 parameters trained, 168 frozen",
        "  Conv2d(in_channels=1, out_channels=8, kernel_size=3, padding=1) → (8, 8, 8), 80 frozen",
        "    Conv2d(in_channels=8, out_channels=8, kernel_size=1) → (8, 8, 8), 72 frozen",
        "  Linear(in_features=128, out_features=10) → (10,), 1,290 trained",
        "task multiclass: 10 classes from records of shape (1, 8, 8), loss cross-entropy",
        "learning rate auto, batches of 64 of 100 records (rate 0.64)",
        "clipping per-sample at norm 1",
    ):
        assert line in joined.out
    weights = tmp_path / WEIGHTS
    (members[0].folder / WEIGHTS).write_bytes(weights.read_bytes()[:-1])
    pdsl("peer", "join", "ada", "plan.toml").refused("weights.safetensors is not the file of this plan")


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), "10 classes"),
        (nn.Sequential(nn.Flatten(), nn.Linear(63, 10)), "fails for records of shape (64,)"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).requires_grad_(False), "no parameters to train"),
    ],
)
def test_models_that_do_not_fit_the_task_are_refused_by_invite(tmp_path: Path, module: nn.Module, reason: str) -> None:
    members = make_organisations(tmp_path, 3)
    _, task = write_digits(members)
    with refused(reason):
        make(members, task, [], module)


def test_damaged_weights_are_refused_before_any_file_is_written(tmp_path: Path, loop: Loop) -> None:
    members = make_organisations(tmp_path, 3)
    _, task = write_digits(members)
    make(members, task, [], backbone_with_head())
    weights = members[0].folder / WEIGHTS
    content = weights.read_bytes()
    for damaged in (content[:-4], content + b"x" * 3_000_000, b"\xff" * 8, content[:-1] + b"\x00"):
        weights.write_bytes(damaged)
        with refused("weights.safetensors"):
            run(members[0], loop)
    weights.unlink()
    with refused("copy the file with the model's weights"):
        run(members[0], loop)
    assert not (members[0].folder / "run").exists()


def _plan_values(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    members = make_organisations(tmp_path, 3)
    _, task = write_digits(members)
    values = compose([m.card for m in members], None, [*SETTINGS, "model.name=softmax"], task, QUICK).as_dict()
    return {**values, "hash": "0" * 64, **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"sources": {"os:abort": "0" * 64}},
        {"sources": ["os:abort"]},
        {"sources": {"clinic_models.nets:make": "0" * 64}},
        {"author": "a\nb"},
        {"author": 5},
        {"author": "\x1b[2J"},
    ],
)
def test_hostile_sources_and_authors_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with refused("plan"):
        TrainingPlan.from_values(_with_hash(_plan_values(tmp_path, **changes)), "plan")


def _with_hash(values: dict[str, Any]) -> dict[str, Any]:
    """The plan with its hash as an author with bad intentions writes it; 0 if a value has no JSON form."""
    plain = {name: value for name, value in values.items() if name != "hash"}
    try:
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError):
        return {**plain, "hash": "0" * 64}
    return {**plain, "hash": hashlib.sha256(text.encode()).hexdigest()}


@pytest.mark.parametrize("seed", [10, 11])
def test_fuzz_plans_with_hostile_models_are_refused_in_one_line_or_have_a_model_within_the_limits(
    tmp_path: Path, seed: int
) -> None:
    values, mutator, refusals = _plan_values(tmp_path), Mutator(seed), 0
    for _ in range(500):
        model = {"name": "layers", "layers": mutator.description()}
        if mutator.pick.random() < 0.5:
            model["weights_sha256"] = mutator.pick.choice(["0" * 64, "x", 5, None])
        try:
            plan = TrainingPlan.from_values(
                _with_hash({**values, "config": {**values["config"], "model": model}}), "mail"
            )
        except PdslError as e:
            refusals += 1
            assert "\n" not in str(e) and len(str(e)) < 2000
        else:
            assert architecture.trace(architecture.parse(plan.config.model.layers), plan.task.shape).trained > 0
    assert 400 < refusals <= 500


@pytest.mark.parametrize(
    "path", ["os:abort", "this", "clinic_models", "a.b", ".x:y", "a:b:c", "a.b:c()", "torch.hub:load"]
)
@pytest.mark.parametrize("setting", ["model.name", "task.loss", "task.metric", "public.features"])
def test_import_paths_that_no_member_could_confirm_are_refused_unimported(
    tmp_path: Path, installed: Path, setting: str, path: str
) -> None:
    section, name = setting.split(".")
    values = _plan_values(tmp_path)
    values["config"] = {**values["config"], section: {**values["config"][section], name: path}}
    with refused("plan"):
        TrainingPlan.from_values(_with_hash({**values, "sources": {path: "0" * 64}}), "plan")
    assert not (tmp_path / "imported").exists() and "this" not in sys.modules


def test_a_custom_task_needs_outputs_from_an_own_model(tmp_path: Path, installed: Path) -> None:
    members = make_organisations(tmp_path, 3)
    _, task = write_numbers(members)
    with refused("does not know how many outputs"):
        make(members, task, ["task.loss=clinic_models.nets:quantile", "model.name=mlp"])
    assert isinstance(export_model(nn.Sequential(nn.Linear(1, 1))).weights, bytes)
