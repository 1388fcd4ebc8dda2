"""Every setting of a run but the algorithm's own: typed, validated once, one line of help each.

A section is frozen and refuses names it does not know. Algorithms keep their settings in their own files; `config`
puts all of them together and reads and writes TOML.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator


class Section(BaseModel):
    """A group of settings, like `[graph]` in a TOML file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their whole names, like graph.kind."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


class DataSettings(Section):
    name: Literal["digits", "mnist", "fashion-mnist", "cifar10", "npz", "python"] = Field(
        "digits", description="data set; npz: your own files at data.path; python: an object given to pdsl.train"
    )
    path: str | None = Field(None, description="for npz: one file with x and y, or a folder with one file per agent")
    validation: int | None = Field(
        None, ge=1, description="size of the public set Q; default 2000, or half of a test set smaller than 4000"
    )
    test_fraction: float = Field(0.2, gt=0, lt=1, description="for npz without test data: share held out to test on")


class PartitionSettings(Section):
    kind: Literal["dirichlet", "iid", "shards", "quantity", "natural"] = Field(
        "dirichlet", description="how records are dealt to agents; npz folders are always natural"
    )
    mu: float = Field(0.25, gt=0, description="dirichlet and quantity: concentration; smaller is more heterogeneous")
    classes: int = Field(2, ge=1, description="shards: classes per agent")
    minimum: int = Field(10, ge=1, description="least records of an agent (less where there are not enough for all)")


class GraphSettings(Section):
    kind: Literal[
        "full",
        "ring",
        "bipartite",
        "complete-bipartite",
        "star",
        "line",
        "grid",
        "torus",
        "k-regular",
        "erdos-renyi",
        "small-world",
        "exponential",
        "file",
        "python",
    ] = Field("ring", description="topology; file: an edge list at graph.path; python: a graph given to pdsl.train")
    agents: int = Field(10, ge=2, description="number of agents M")
    degree: int = Field(4, ge=1, description="k-regular and small-world: neighbours of each agent, self not counted")
    probability: float = Field(0.3, gt=0, le=1, description="erdos-renyi: edge; small-world: rewiring probability")
    path: str | None = Field(None, description="for file: a text file, one edge 'i j' per line, agents from 0")


class ModelSettings(Section):
    name: str = Field(
        "auto", description="auto, mnist-cnn, cifar10-cnn, digits-cnn, softmax, mlp, or package.module:callable"
    )
    channels: tuple[PositiveInt, PositiveInt] | None = Field(
        None, description="widths of the two convolutions; default by model"
    )
    hidden: int | None = Field(None, ge=1, description="width of the hidden layer (cifar10-cnn, mlp); default by model")
    activation: Literal["relu", "tanh"] | None = Field(
        None, description="default: relu where feature maps are normed, else tanh; the paper has relu"
    )
    norm: Literal["none", "rms", "centred"] = Field(
        "centred",
        description="cnn models: a record's feature maps at mean square 1; centred: and at mean 0; the paper has none",
    )


class BatchSettings(Section):
    size: int = Field(64, ge=1, description="batch size B; with poisson the size expected of an average agent")
    rate: float | None = Field(
        None, gt=0, le=1, description="poisson: sampling rate q, a public constant; default size / records"
    )
    records: float | None = Field(
        None,
        ge=1,
        description="poisson: public number of records of an average agent; default: a published data set's own",
    )
    sampler: Literal["poisson", "fixed"] = Field(
        "poisson", description="poisson: each record with the same rate q; fixed: B distinct records, uniformly"
    )

    @model_validator(mode="after")
    def _one_source_of_the_rate(self) -> "BatchSettings":
        if self.rate is not None and self.records is not None:
            raise ValueError("rate and records both say how often a record is drawn; leave one out")
        if self.sampler == "fixed" and (self.rate is not None or self.records is not None):
            raise ValueError("rate and records are for sampler 'poisson'; leave them out with 'fixed'")
        return self


class ShapleySettings(Section):
    estimator: Literal["auto", "exact", "montecarlo", "fast"] = Field(
        "auto",
        description="exact, montecarlo (Algorithm 2), fast (mean of logits); auto: exact to 5 members, fast beyond",
    )
    permutations: int = Field(20, ge=1, description="R, the permutations of montecarlo (and of fast beyond 10 members)")
    orders: Literal["circular", "independent"] = Field(
        "circular",
        description="permutations: members in a circle, from each and both ways; independent as in the paper",
    )
    sample: int | None = Field(
        None, ge=1, description="records of Q looked at in a round, drawn anew each time; default all of them"
    )
    check_every: int = Field(
        10, ge=0, description="fast: rounds between checks of a few coalitions against their true models; 0: never"
    )
    value: Literal["accuracy", "loss", "centred"] = Field(
        "centred",
        description="what makes a model good on Q: minus its loss with centred logits, minus its loss, or its accuracy,"
        " as in the paper",
    )
    probe: float = Field(
        0.1, gt=0, description="length of the step by which a message is valued, in learning rates; the paper has 1"
    )
    empty: Literal["model", "zero"] = Field(
        "model", description="v of the empty coalition: accuracy of the agent's model, or zero as in the paper"
    )
    weighting: Literal["evidence", "minmax", "uniform"] = Field(
        "evidence",
        description="evidence: less for those seen to hurt; minmax as in the paper; uniform: no values, all alike",
    )
    memory: float = Field(
        0.97, gt=0, lt=1, description="evidence: how much of it is kept when the values of another round come in"
    )
    floor: float = Field(0.0, ge=0, le=1, description="λ: share = (1-λ)·φ̂/Σφ̂ + λ/k, so that nobody's is 0")

    @model_validator(mode="after")
    def _zero_is_an_accuracy(self) -> "ShapleySettings":
        if self.value != "accuracy" and self.empty == "zero":
            raise ValueError("empty 'zero' is the worst accuracy but the best loss; set value 'accuracy' with it")
        return self

    @model_validator(mode="after")
    def _one_record_has_nothing_beside_its_mean(self) -> "ShapleySettings":
        if self.value == "centred" and self.sample == 1:
            raise ValueError(
                "value 'centred' takes the mean over the sample off, which leaves nothing of 1; try sample 100"
            )
        return self


DEFAULT_EPSILON = 8.0  # total, where noise is on and nothing says how much


class PrivacySettings(Section):
    mode: Literal["sound", "per-round", "noise", "paper", "none"] = Field(
        "sound",
        description="sound: one total budget; per-round: an ε for each round; noise: σ as given; paper: σ by Theorem 1;"
        " none: no privacy",
    )
    target_epsilon: float | None = Field(
        None, gt=0, description=f"total ε of the whole run; σ is found for it; default {DEFAULT_EPSILON:g}"
    )
    delta: float = Field(1e-5, gt=0, lt=1, description="δ of the whole run")
    clipping: Literal["per-sample", "batch"] = Field(
        "per-sample", description="clip each record's gradient, or the batch's as in the paper"
    )
    max_grad_norm: float = Field(1.0, gt=0, description="clipping threshold C")
    noise_multiplier: float | None = Field(
        None, ge=0, description="for experts: σ/(√k·Δ) instead of a target; a target is then the budget only"
    )
    sigma: float | None = Field(None, ge=0, description="for experts: σ of the noise on every message, likewise")
    epsilon_per_round: float | None = Field(
        None,
        gt=0,
        description="per-round: ε that a round by itself may spend; paper: ε from which Theorem 1 computes σ",
    )
    phi_min: float | None = Field(
        None, gt=0, le=1, description="paper: least share φ̂_min in Theorem 1; default λ/k from shapley.floor"
    )
    randomness: Literal["seeded", "system"] = Field(
        "seeded", description="seeded: for simulation, not private; system: the operating system's entropy"
    )

    @model_validator(mode="after")
    def _one_source_of_noise(self) -> "PrivacySettings":
        amounts = ("noise_multiplier", "sigma", "epsilon_per_round")
        given = [name for name in amounts if getattr(self, name) is not None]
        if self.mode == "noise" and len(given) != 1:
            raise ValueError(
                f"mode 'noise' takes exactly one of {', '.join(amounts)} (given: {', '.join(given) or 'none'})"
            )
        if self.mode == "paper" and given != ["epsilon_per_round"]:
            raise ValueError("mode 'paper' computes σ by Theorem 1 from epsilon_per_round alone; set it, like 0.08")
        if self.mode == "per-round" and given != ["epsilon_per_round"]:
            raise ValueError("mode 'per-round' finds σ for epsilon_per_round alone; set it, like 0.08")
        if self.mode == "sound" and "epsilon_per_round" in given:
            raise ValueError(
                "epsilon_per_round is for modes 'per-round' and 'paper'; mode 'sound' takes a total, target_epsilon"
            )
        if self.mode == "sound" and len(given) > 1:
            raise ValueError("noise_multiplier and sigma both say how much noise, exactly one can hold; leave one out")
        return self

    @property
    def budget(self) -> float | None:
        """The total ε that no agent may pass; None where only the amount of noise was given."""
        amount_given = self.mode != "sound" or self.noise_multiplier is not None or self.sigma is not None
        return self.target_epsilon if amount_given else self.target_epsilon or DEFAULT_EPSILON


class RogueSettings(Section):
    flipped: int = Field(0, ge=0, description="agents that learn from flipped labels; for experiments, as the others")
    noise: int = Field(0, ge=0, description="agents that send a random vector of norm C in the place of a gradient")
    idle: int = Field(0, ge=0, description="agents with nothing to give: they send zero, and its noise")


class EngineSettings(Section):
    device: str = Field("cpu", description="torch device: cpu, cuda, cuda:1, mps")
    workers: int | None = Field(None, ge=1, description="single-threaded workers; default: one per core")
    exact: bool = Field(
        False, description="nothing is shared between agents: the same bits however they are spread over processes; cpu"
    )
    timeout: float = Field(
        120.0, gt=0, description="on several ranks: seconds to wait for another; more than a round takes to compute"
    )
