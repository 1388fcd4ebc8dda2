"""What a coalition is worth on Q, by plain torch."""

import copy
import threading
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from pdsl.models.network import Network
from pdsl.settings import ShapleySettings
from pdsl.shapley.coalitions import MAX_EXACT
from pdsl.shapley.valuation import Validation
from pdsl.utils.random import Streams
from pdsl.utils.workers import Workers
from tests.helpers.refusals import refused
from tests.oracles import literal


class Counting(Network):
    """Counts the models it evaluates."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.evaluated = 0
        self._lock = threading.Lock()

    def outputs(self, x: Tensor, inputs: Tensor) -> Tensor:
        with self._lock:
            self.evaluated += 1
        return super().outputs(x, inputs)


def mlp() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def softmax() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 3))


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_accuracy(**settings: object) -> ShapleySettings:
    return ShapleySettings.model_validate({"value": "accuracy", **settings})


QUESTIONS = normal(0, 90, 4)
ANSWERS = torch.arange(90) % 3


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers(2) as pool:
        yield pool


def public_set(module: nn.Module, workers: Workers) -> tuple[Validation, Counting]:
    network = Counting(module)
    return Validation(network, QUESTIONS, ANSWERS, Streams(11), workers), network


def models(d: int, agents: int, k: int, seed: int = 3) -> tuple[Tensor, list[Tensor]]:
    """Agents' models [m, d], and k candidates each [k, d], far enough apart to answer differently."""
    x = normal(seed, agents, d)
    return x, [x[i] + normal(seed + 1 + i, k, d) for i in range(agents)]


def accuracy(module: nn.Module, x: Tensor) -> Fraction:
    """By plain torch."""
    model = copy.deepcopy(module)
    vector_to_parameters(x, model.parameters())
    with torch.no_grad():
        return Fraction(int((model(QUESTIONS).argmax(dim=1) == ANSWERS).sum()), len(ANSWERS))


@pytest.mark.parametrize("empty", ["model", "zero"])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_coalition_is_worth_its_mean_models_accuracy(k: int, empty: str, workers: Workers) -> None:
    module = mlp()
    Q, network = public_set(module, workers)
    x, candidates = models(network.num_parameters, 2, k)
    settings = by_accuracy(estimator="exact", empty_value=empty)
    for i, valuation in enumerate(Q.contributions(1, [0, 1], x, candidates, settings)):
        v_empty = accuracy(module, x[i]) if empty == "model" else Fraction(0)

        def v(S: frozenset[int], i: int = i, v_empty: Fraction = v_empty) -> Fraction:
            return accuracy(module, candidates[i][sorted(S)].mean(0)) if S else v_empty

        oracle = literal.exact_shapley(range(k), v)
        assert valuation.phi == pytest.approx([float(oracle[j]) for j in range(k)], abs=1e-12)
        alone = [float(v(frozenset([j])) - v_empty) for j in range(k)]
        assert valuation.alone == pytest.approx(alone, abs=1e-12)
        assert valuation.coalitions == 2**k


def loss(module: nn.Module, x: Tensor, centred: bool = False) -> float:
    """By plain torch."""
    model = copy.deepcopy(module).double()
    vector_to_parameters(x.double(), model.parameters())
    with torch.no_grad():
        logits = model(QUESTIONS.double())
        return float(nn.functional.cross_entropy(logits - centred * logits.mean(0), ANSWERS))


@pytest.mark.parametrize("value", ["loss", "centred"])
@pytest.mark.parametrize("estimator", ["exact", "fast"])
def test_worth_may_be_minus_the_loss(estimator: str, value: str, workers: Workers) -> None:
    module = softmax()  # linear, so that 'fast' is exact too
    Q, network = public_set(module, workers)
    x, candidates = models(network.num_parameters, 1, 4)
    (valuation,) = Q.contributions(1, [0], x, candidates, ShapleySettings(estimator=estimator, value=value))

    def v(S: frozenset[int]) -> Fraction:
        return -Fraction(loss(module, candidates[0][sorted(S)].mean(0) if S else x[0], value == "centred"))

    oracle = literal.exact_shapley(range(4), v)
    assert valuation.phi == pytest.approx([float(oracle[j]) for j in range(4)], abs=3e-6)


def test_centred_worth_does_not_count_how_often_a_class_is_named(workers: Workers) -> None:
    Q, network = public_set(softmax(), workers)
    x, (candidates,) = models(network.num_parameters, 1, 2)
    classes = len(set(ANSWERS.tolist()))
    candidates[1] = candidates[0]
    candidates[1, -classes:] += 3 * torch.arange(classes)  # biases
    phi = {
        value: Q.contributions(1, [0], x, [candidates], ShapleySettings(estimator="exact", value=value))[0].phi
        for value in ("loss", "centred")
    }
    assert phi["loss"][0] > phi["loss"][1] + 0.1
    assert phi["centred"][0] == pytest.approx(phi["centred"][1], abs=1e-6)


def test_a_message_that_ruins_the_model_is_worth_little_but_finite(workers: Workers) -> None:
    Q, network = public_set(mlp(), workers)
    x, (candidates,) = models(network.num_parameters, 1, 3)
    candidates[1] = torch.nan
    for estimator in ("exact", "fast"):
        for value in ("loss", "centred"):
            (valuation,) = Q.contributions(1, [0], x, [candidates], ShapleySettings(estimator=estimator, value=value))
            assert np.isfinite(valuation.phi).all()
            assert valuation.phi.argmin() == 1


@pytest.mark.parametrize(("k", "other"), [(3, "exact"), (7, "exact"), (12, "montecarlo")])
def test_fast_is_true_for_a_model_linear_in_its_parameters(k: int, other: str, workers: Workers) -> None:
    """Its logits are linear too, so the logits of a mean are the mean of logits; both draw the same permutations."""
    Q, network = public_set(softmax(), workers)
    x, candidates = models(network.num_parameters, 2, k)
    fast, true = (
        Q.contributions(4, [0, 1], x, candidates, by_accuracy(estimator=estimator, permutations=5))
        for estimator in ("fast", other)
    )
    for a, b in zip(fast, true, strict=True):
        assert np.ptp(b.phi) > 0.01
        assert a.phi == pytest.approx(b.phi, abs=1e-12)


def test_fast_evaluates_each_member_once(workers: Workers) -> None:
    Q, network = public_set(mlp(), workers)
    x, candidates = models(network.num_parameters, 2, 7)
    Q.contributions(1, [0, 1], x, candidates, by_accuracy(estimator="fast", empty_value="zero"))
    assert network.evaluated == 2 * 7


def test_auto_is_exact_up_to_5_members_and_fast_beyond(workers: Workers) -> None:
    Q, network = public_set(mlp(), workers)
    for k, estimator, evaluated, coalitions in [(5, "exact", 31 + 1, 32), (6, "fast", 6 + 1, 64)]:
        network.evaluated = 0
        x, candidates = models(network.num_parameters, 1, k)
        [valuation] = Q.contributions(1, [0], x, candidates, by_accuracy(estimator="auto"))
        assert (valuation.estimator, network.evaluated, valuation.coalitions) == (estimator, evaluated, coalitions)


@pytest.mark.parametrize("estimator", ["montecarlo", "fast"])
def test_beyond_10_members_permutations_are_looked_at(estimator: str, workers: Workers) -> None:
    Q, network = public_set(softmax(), workers)
    x, candidates = models(network.num_parameters, 1, 11)
    settings = by_accuracy(estimator=estimator, permutations=3)
    [valuation] = Q.contributions(1, [0], x, candidates, settings)
    assert 11 + 1 <= valuation.coalitions <= 3 * 11 + 1
    expected = valuation.coalitions - 1 if estimator == "montecarlo" else 11
    assert network.evaluated == expected + 1
    # Efficiency holds for any permutations, so it tells v of the whole coalition from outside.
    whole = accuracy(softmax(), candidates[0].mean(0)) - accuracy(softmax(), x[0])
    assert valuation.phi.sum() == pytest.approx(float(whole), abs=1e-12)


def test_permutations_differ_between_agents_and_rounds_and_come_again(workers: Workers) -> None:
    Q, network = public_set(mlp(), workers)
    x, [candidates, _] = models(network.num_parameters, 2, 8)
    settings = by_accuracy(estimator="montecarlo", permutations=2)

    def phi(t: int, agent: int) -> list[float]:
        return Q.contributions(t, [agent], x[:1], [candidates], settings)[0].phi.tolist()

    assert phi(1, 0) == phi(1, 0)
    assert phi(1, 0) != phi(2, 0)
    assert phi(1, 0) != phi(1, 1)


def test_exact_is_refused_beyond_its_limit(workers: Workers) -> None:
    Q, network = public_set(softmax(), workers)
    x, candidates = models(network.num_parameters, 1, MAX_EXACT + 1)
    with refused("shapley.estimator=exact", "15 members", "montecarlo or fast"):
        Q.contributions(1, [0], x, candidates, by_accuracy(estimator="exact"))
    assert network.evaluated == 0


def test_uniform_weighting_evaluates_nothing(workers: Workers) -> None:
    Q, network = public_set(mlp(), workers)
    x, candidates = models(network.num_parameters, 2, 3)
    valuations = Q.contributions(1, [0, 1], x, candidates, ShapleySettings(weighting="uniform"))
    assert network.evaluated == 0
    assert [v.coalitions for v in valuations] == [0, 0]
    assert [v.phi.tolist() for v in valuations] == [[0.0] * 3] * 2


@pytest.mark.parametrize(("estimator", "each"), [("exact", 2**3 - 1), ("fast", 3)])
def test_equal_candidates_are_evaluated_once(estimator: str, each: int, workers: Workers) -> None:
    """Agents 0 and 2 hold the same candidates, agents 0 and 1 the same model; v(∅) still is everybody's own."""
    Q, network = public_set(mlp(), workers)
    x, [a, b, _] = models(network.num_parameters, 3, 3)
    x[1] = x[0]
    candidates = [a, b, a.clone()]
    together = Q.contributions(1, range(3), x, candidates, by_accuracy(estimator=estimator))
    assert network.evaluated == 2 * each + 2
    for i in range(3):
        [alone] = Q.contributions(1, [i], x[i : i + 1], [candidates[i]], by_accuracy(estimator=estimator))
        assert together[i].phi.tolist() == alone.phi.tolist()
    assert together[0].phi.tolist() != together[2].phi.tolist()  # v(∅) differs


def test_the_same_member_twice_is_worth_the_same(workers: Workers) -> None:
    Q, network = public_set(mlp(), workers)
    x, [c] = models(network.num_parameters, 1, 4)
    c[3] = c[1]
    [valuation] = Q.contributions(1, [0], x, [c], by_accuracy(estimator="fast"))
    assert valuation.phi[3] == valuation.phi[1]


def test_neighbourhoods_may_differ_in_size(workers: Workers) -> None:
    Q, network = public_set(mlp(), workers)
    x, [a, b] = models(network.num_parameters, 2, 6)
    valuations = Q.contributions(1, [0, 1], x, [a, b[:2]], by_accuracy())
    assert [(v.estimator, len(v.phi)) for v in valuations] == [("fast", 6), ("exact", 2)]


def test_a_part_of_the_public_set_is_the_same_for_all_agents_and_another_each_round(workers: Workers) -> None:
    module = mlp()
    Q, network = public_set(module, workers)
    x, [candidates] = models(network.num_parameters, 1, 3)
    x = x.repeat(2, 1)
    by_round = []
    for t in (1, 2):
        settings = by_accuracy(estimator="exact", sample=20, empty_value="zero")
        a, b = Q.contributions(t, [0, 1], x, [candidates, candidates.clone()], settings)
        assert a.phi.tolist() == b.phi.tolist()
        whole = a.phi.sum() * 20  # v(N) in records of the part, by efficiency
        assert whole == pytest.approx(round(whole), abs=1e-9)
        by_round.append(a.phi.tolist())
    assert by_round[0] != by_round[1]


@pytest.mark.parametrize("sample", [len(ANSWERS), 10 * len(ANSWERS)])
def test_a_part_as_large_as_the_public_set_is_all_of_it(sample: int, workers: Workers) -> None:
    Q, network = public_set(mlp(), workers)
    x, candidates = models(network.num_parameters, 1, 3)
    part, all_of_it = (Q.contributions(1, [0], x, candidates, by_accuracy(sample=n))[0] for n in (sample, None))
    assert part.phi.tolist() == all_of_it.phi.tolist()


def test_the_part_is_worth_what_its_records_say(workers: Workers) -> None:
    """The mean over many rounds' parts is the value on all of Q."""
    Q, network = public_set(softmax(), workers)
    x, candidates = models(network.num_parameters, 1, 1)
    found = [
        Q.contributions(t, [0], x, candidates, by_accuracy(sample=30, empty_value="zero"))[0].phi[0] for t in range(300)
    ]
    p = float(accuracy(softmax(), candidates[0][0]))
    without_replacement = (90 - 30) / (90 - 1)
    assert np.mean(found) == pytest.approx(p, abs=5 * np.sqrt(p * (1 - p) / 30 * without_replacement / 300))
