"""Settings from TOML, `--set` and Python: documented names, round trips through TOML, and refusals."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import pdsl
from pdsl.config import Config, commented_toml, describe, load, validate
from tests.helpers.refusals import refused

PROMISED: list[tuple[str, Any]] = [
    ("rounds", 7),
    ("seed", 3),
    ("evaluate_every", 2),
    ("checkpoint_every", 5),
    ("data.name", "mnist"),
    ("data.path", "my records/α.npz"),
    ("data.validation", 100),
    ("partition.kind", "iid"),
    ("partition.mu", 0.1),
    ("graph.kind", "full"),
    ("graph.agents", 20),
    ("model.name", "mlp"),
    ("model.channels", (3, 4)),
    ("algorithm.name", "pdsl"),
    ("algorithm.learning_rate", 0.25),
    ("algorithm.momentum", 0.9),
    ("algorithm.shapley.estimator", "montecarlo"),
    ("algorithm.shapley.permutations", 11),
    ("privacy.max_grad_norm", 2.5),
    ("privacy.clipping", "per-sample"),
    ("privacy.clipping", "batch"),
    ("batch.size", 64),
    ("batch.sampler", "poisson"),
    ("batch.sampler", "fixed"),
    ("engine.workers", 3),
    ("engine.device", "cuda:1"),
]


def value_of(config: Config, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def again(config: Config, tmp_path: Path) -> Config:
    """The config after a round trip through both kinds of TOML, which must agree."""
    plain, commented = tmp_path / "plain.toml", tmp_path / "commented.toml"
    plain.write_text(config.to_toml(), encoding="utf-8")
    commented.write_text(commented_toml(config), encoding="utf-8")
    assert load(plain) == load(commented)
    return load(plain)


def test_the_help_of_a_setting_names_every_word_that_it_accepts() -> None:
    texts = {name: text for name, _, text in describe()}
    assert texts["task.kind"].endswith("; one of auto, multiclass, binary, multilabel, regression, custom")
    assert "one of" not in texts["graph.kind"] + texts["privacy.mode"]
    for word in ("dirichlet", "iid", "shards", "quantity", "natural"):
        assert word in texts["partition.kind"]
    assert "fashion-mnist" in texts["data.name"] and "multilabel" in texts["task.kind"]
    assert "per-sample" in texts["privacy.clipping"] and "zero" in texts["algorithm.shapley.empty_value"]


@pytest.mark.parametrize(("name", "value"), PROMISED)
def test_set_changes_one_setting(name: str, value: Any, tmp_path: Path) -> None:
    text = list(value) if isinstance(value, tuple) else value
    config = load(None, [f"{name}={text}"])
    assert value_of(config, name) == value
    assert again(config, tmp_path) == config
    unset = load(None, [f"{name}={text}", f"{name}="])
    assert unset == load(None)


@pytest.mark.parametrize("amount", ["noise_multiplier", "sigma", "epsilon_per_round"])
def test_noise_has_one_of_three_amounts(amount: str, tmp_path: Path) -> None:
    config = load(None, ["privacy.mode=noise", f"privacy.{amount}=1.5"])
    assert (config.privacy.mode, getattr(config.privacy, amount)) == ("noise", 1.5)
    assert again(config, tmp_path) == config


def test_a_later_set_wins_over_an_earlier_and_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("rounds = 5\nseed = 4\n[graph]\nagents = 6\nkind = 'full'\n")
    config = load(file, ["graph.agents=7", " graph.agents = 8 ", "seed=9"])
    assert (config.rounds, config.seed, config.graph.agents, config.graph.kind) == (5, 9, 8, "full")


@pytest.mark.parametrize("text", ["true", "[1, 2]", "a=b", "it's", 'a"b', "2024-01-01", "x # y", "{", "\\"])
def test_a_text_is_toml_or_else_itself(text: str) -> None:
    """Any text after the = is a value or a one-line refusal."""
    try:
        path = load(None, [f"data.path={text}"]).data.path
    except pdsl.PdslError as e:
        assert "data.path" in str(e)
        assert "\n" not in str(e)
    else:
        assert path == text


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    path=st.text(min_size=1), seed=st.integers(0, 2**63 - 1), mu=st.floats(1e-300, 1e300), classes=st.integers(1, 99)
)
def test_any_value_survives_toml(path: str, seed: int, mu: float, classes: int) -> None:
    values = {"seed": seed, "data": {"path": path}, "partition": {"mu": mu, "classes": classes}}
    config = validate(values, "here")
    for toml in (config.to_toml(), commented_toml(config)):
        assert validate(tomllib.loads(toml), "toml") == config


def test_every_setting_is_described_once_and_written() -> None:
    described = list(describe())
    names = [name for name, _, _ in described]
    assert len(set(names)) == len(names)
    assert {name for name, _ in PROMISED} < set(names)
    defaults = load(None)
    written = commented_toml(defaults)
    for name, default, text in described:
        assert text
        assert "\n" not in text
        if name != "algorithm.name":
            assert value_of(defaults, name) == default
        key = name.rpartition(".")[2]
        assert any(
            line.startswith((f"{key} = ", f"# {key} =")) and line.endswith(text) for line in written.splitlines()
        )
    assert tomllib.loads(written) == defaults.as_dict()


def test_shapley_settings_are_the_algorithms(tmp_path: Path) -> None:
    wanted = pdsl.Shapley(estimator="montecarlo", permutations=3, floor=0.25)
    config = validate({"algorithm": pdsl.PDSL(learning_rate=0.5, shapley=wanted)}, "here")
    assert again(config, tmp_path) == config
    assert again(config, tmp_path).algorithm.shapley == wanted  # type: ignore[attr-defined]
    assert config.as_dict()["algorithm"]["shapley"]["permutations"] == 3
    assert load(None, ["algorithm.shapley.floor=0.25"]).algorithm == pdsl.PDSL(shapley=pdsl.Shapley(floor=0.25))
    assert "shapley" not in load(None, ["algorithm.name=muffliato"]).to_toml()


def test_theorem_1_has_the_floor_of_the_algorithm_unless_privacy_sets_one() -> None:
    assert load(None, ["algorithm.shapley.floor=0.25"]).share_floor == 0.25
    assert load(None, ["algorithm.shapley.floor=0.25", "privacy.share_floor=0.5"]).share_floor == 0.5
    assert load(None, ["algorithm.name=muffliato"]).share_floor == 0.0
    assert load(None, ["algorithm.name=muffliato", "privacy.share_floor=0.1"]).share_floor == 0.1


WRONG: dict[str, list[str]] = {
    "roundz=3": ["roundz", "did you mean rounds?"],
    "roundz=": ["roundz", "did you mean rounds?"],
    "graph.agnts=": ["graph.agnts", "did you mean graph.agents?"],
    "graph.agent=3": ["graph.agent", "did you mean graph.agents?"],
    "algorithm.learning-rate=3": ["did you mean algorithm.learning_rate?"],
    "nothing.like.this=1": ["unknown setting nothing", "pdsl config"],
    "rounds=ten": ["rounds=ten", "integer"],
    "rounds=2.5": ["rounds=2.5", "integer"],
    "rounds=0": ["rounds=0", "1"],
    "rounds=[1]": ["rounds", "integer"],
    "rounds.x=1": ["rounds", "integer"],
    "seed=-1": ["seed=-1", "0"],
    "graph=rink": ["graph.kind=rink", "'ring'"],
    "graph.kind=circle": ["graph.kind=circle", "'ring'"],
    "graph.agents=1": ["graph.agents=1", "2"],
    "partition.mu=0": ["partition.mu=0", "greater than 0"],
    "partition.mu=-0.5": ["partition.mu=-0.5"],
    "partition.mu=nan": ["partition.mu=nan", "finite"],
    "partition.mu=inf": ["partition.mu=inf", "finite"],
    "algorithm.name=pdls": ["pdls", "pdsl"],
    "algorithm.name=[1]": ["algorithm", "pdsl"],
    "algorithm=3": ["algorithm=3"],
    "algorithm.learning_rate=0": ["algorithm.learning_rate=0"],
    "algorithm.momentum=1": ["algorithm.momentum=1"],
    "algorithm.shapley.estimator=guess": ["algorithm.shapley.estimator=guess", "montecarlo"],
    "shapley.value=loss": ["unknown setting shapley.value", "did you mean algorithm.shapley.value?"],
    "shapley.value=": ["did you mean algorithm.shapley.value?"],
    "momentum=0.3": ["did you mean algorithm.momentum?"],
    "algorithm.local_steps=3": ["this algorithm has no setting algorithm.local_steps", "these have: "],
    "privacy.mode=noise": ["privacy", "noise_multiplier", "sigma", "epsilon_per_round"],
    "privacy.epsilon_per_round=1": ["privacy", "epsilon_per_round", "target_epsilon"],
    "privacy.mode=paper": ["privacy", "epsilon_per_round"],
    "privacy.clipping=sometimes": ["privacy.clipping=sometimes", "per-sample"],
    "batch.sampler=all": ["batch.sampler=all", "poisson"],
    "batch.size=0": ["batch.size=0"],
    "model.channels=[1]": ["model.channels"],
    "model.channels=[0, 3]": ["model.channels"],
    "rounds": ["--set rounds", "key=value"],
    "=3": ["--set =3", "key=value"],
}


def test_a_graph_and_an_algorithm_may_be_given_by_name() -> None:
    short = load(None, ["graph=torus", "graph.agents=12", "algorithm=muffliato", "algorithm.gossip_steps=2"])
    whole = ["graph.kind=torus", "graph.agents=12", "algorithm.name=muffliato", "algorithm.gossip_steps=2"]
    assert short == load(None, whole)


@pytest.mark.parametrize("assignment", WRONG)
def test_a_wrong_set_is_refused_in_one_line(assignment: str) -> None:
    with refused(*WRONG[assignment]):
        load(None, [assignment])


def test_two_amounts_of_noise_are_refused() -> None:
    with refused("noise_multiplier", "sigma", "exactly one"):
        load(None, ["privacy.mode=noise", "privacy.sigma=1", "privacy.noise_multiplier=1"])


def test_a_mistake_in_a_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[graph]\nagent = 3\n")
    with refused(str(file), "did you mean graph.agents?"):
        load(file)
    for broken in ("rounds = \n", "[graph\n", "rounds = 1\nrounds = 2\n"):
        file.write_text(broken)
        with refused(str(file), "TOML", "line", "pdsl config"):
            load(file)
    file.write_bytes(b"\xff\xfe")
    with refused(str(file), "TOML"):
        load(file)
    with refused(str(tmp_path), "directory"):
        load(tmp_path)
    with refused("nowhere.toml", "no such config file", "pdsl config"):
        load(tmp_path / "nowhere.toml")


def test_a_setting_of_two_kinds_says_what_each_of_them_may_be() -> None:
    with refused("algorithm.gossip_steps=banana", "valid integer", "'auto'"):
        load(None, ["algorithm.gossip_steps=banana"])
