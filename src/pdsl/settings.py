"""Sections of settings: typed, validated, with one line of help per setting.

An algorithm is a section too, in its own file. `config` puts all of them together and reads and writes TOML.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from pdsl.section import Section

LAYERS = "layers"  # name of a model that is given as data
FILE_KINDS = ("npz", "csv", "parquet")  # names of data in files, which are their extensions


def file_kind(path: object) -> str | None:
    """Name of the data in a file, by its extension; None if the extension is another."""
    suffix = path.rpartition(".")[2].lower() if isinstance(path, str) else None
    return suffix if suffix in FILE_KINDS and path != suffix else None


class DataSettings(Section):
    name: Literal["digits", "mnist", "fashion-mnist", "cifar10", "npz", "csv", "parquet", "python"] = Field(
        "digits",
        description="data set: digits, mnist, fashion-mnist, cifar10; npz, csv, parquet: your own files at data.path"
        " (default: its extension); python: an object given to pdsl.train",
    )
    path: str | None = Field(None, description="for npz, csv and parquet: a file, or a folder with one file per agent")
    test_path: str | None = Field(None, description="for csv and parquet: a file with test records")
    target: str | tuple[str, ...] | None = Field(
        None, description="tables and Hugging Face data: column of the target; several for several numbers or labels"
    )
    owner: str | None = Field(
        None, description="tables and Hugging Face data: column with the agent that owns the record"
    )
    columns: tuple[str, ...] | None = Field(
        None, description="tables and Hugging Face data: columns that are inputs; default: all others"
    )
    categories: dict[str, tuple[str | int, ...]] | None = Field(
        None, description="tables: possible values of columns of text, which become one column per value"
    )
    classes: int | tuple[str | int, ...] | None = Field(
        None,
        description="number of classes, or all labels in order; needed in a private run with other labels than 0, 1, …",
    )
    pixels: bool | None = Field(
        None, description="bytes (uint8) are pixels and are divided by 255 (true), or integers (false)"
    )
    scale: Literal["none", "public"] | None = Field(
        None,
        description="public: standardise inputs by mean and deviation of Q (default for tables); none: leave them as"
        " they are",
    )
    validation: int | None = Field(
        None, ge=1, description="size of the public set Q; default 2000, digits 100, at most half of the test set"
    )
    public_seed: int | None = Field(
        None, ge=0, description="seed of the draw of Q from the test set; default: the run's seed"
    )
    test_fraction: float = Field(
        0.2, gt=0, lt=1, description="your own data without test data: fraction held out for testing"
    )

    @model_validator(mode="before")
    @classmethod
    def _name_by_path(cls, values: object) -> object:
        """Without a name, the extension of the path is the name."""
        if not isinstance(values, Mapping):
            return values
        name, kind = values.get("name"), file_kind(values.get("path"))
        if name is None and kind is not None:
            return {**values, "name": kind}
        if file_kind(name):
            raise ValueError(f"{name} is a file, not a name; set data.path={name}")
        return values


class PartitionSettings(Section):
    kind: Literal["dirichlet", "iid", "shards", "quantity", "natural"] = Field(
        "dirichlet",
        description="how records without an owner are split across agents: dirichlet, iid, shards, quantity; natural:"
        " all records have owners",
    )
    mu: float = Field(0.25, gt=0, description="dirichlet and quantity: concentration; smaller is more heterogeneous")
    classes: int = Field(2, ge=1, description="shards: classes per agent")
    minimum: int = Field(10, ge=1, description="minimum records per agent (fewer if there are not enough for all)")


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
        "one-peer-exponential",
        "base-k",
        "file",
        "python",
    ] = Field(
        "ring",
        description="topology: full, ring, bipartite, complete-bipartite, star, line, grid, torus, exponential,"
        " k-regular, erdos-renyi, small-world; changing every round: one-peer-exponential, base-k; file: an edge list"
        " at graph.path; python: a graph given to pdsl.train",
    )
    agents: int = Field(10, ge=2, description="number of agents M")
    degree: int = Field(4, ge=1, description="k-regular and small-world: neighbours of each agent, itself not counted")
    probability: float = Field(
        0.3, gt=0, le=1, description="erdos-renyi: edge probability; small-world: rewiring probability"
    )
    k: int = Field(1, ge=1, description="base-k: most neighbours of an agent in a round, itself not counted")
    seed: int | None = Field(None, ge=0, description="seed of a random graph; default: the run's seed")
    path: str | None = Field(None, description="for file: a text file, one edge 'i j' per line, agents from 0")


class ModelSettings(Section):
    name: str = Field(
        "auto",
        description="auto, mnist-cnn, cifar10-cnn, digits-cnn, softmax, linear, mlp, layers (those of model.layers), or"
        " package.module:callable",
    )
    channels: tuple[PositiveInt, PositiveInt] | None = Field(
        None, description="widths of the two convolutions; default by model"
    )
    hidden: int | None = Field(None, ge=1, description="width of the hidden layer (cifar10-cnn, mlp); default by model")
    activation: Literal["relu", "tanh"] | None = Field(
        None, description="default: relu if feature maps are normalised, else tanh; paper: relu"
    )
    norm: Literal["none", "rms", "centred"] = Field(
        "centred",
        description="cnn models: rms: a record's feature maps have mean square 1; centred: also mean 0; paper: none",
    )
    layers: tuple[dict[str, Any], ...] | None = Field(
        None, description="the model as data: a list of layers like {type = 'Linear', in_features = 64, …}"
    )
    weights_path: str | None = Field(
        None, description="safetensors file with the initial weights; default: random, from the seed"
    )
    weights_sha256: str | None = Field(
        None, pattern="^[0-9a-f]{64}$", description="SHA-256 of the file at model.weights_path; a plan has only this"
    )

    @model_validator(mode="before")
    @classmethod
    def _name_by_layers(cls, values: object) -> object:
        """Without a name, a model with layers has the name `layers`."""
        if not isinstance(values, Mapping) or values.get("layers") is None:
            return values
        return {"name": LAYERS, **values}

    @model_validator(mode="after")
    def _check_layers(self) -> "ModelSettings":
        if (self.layers is not None) != (self.name == LAYERS):
            raise ValueError(f"model.layers and the name '{LAYERS}' go together; set both, or leave both out")
        return self


Weight = Annotated[float, Field(gt=0)]


class TaskSettings(Section):
    kind: Literal["auto", "multiclass", "binary", "multilabel", "regression", "custom"] = Field(
        "auto",
        description="meaning of the targets; auto: float targets are regression, integers classes (binary if the model"
        " has one output), several integers per record labels",
    )
    loss: str | None = Field(
        None, description="your own loss: package.module:function of (outputs, targets), one number per record"
    )
    metric: str | None = Field(None, description="one more metric: package.module:function of (outputs, targets)")
    class_weights: Literal["public"] | tuple[Weight, ...] | dict[str, Weight] | None = Field(
        None, description="weight of each class in the loss, by number or name; public: balanced by counts in Q"
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of a target spread over all classes")
    huber: float | None = Field(
        None, gt=0, description="regression: error above which the loss is linear; default squared error"
    )
    standardise_targets: bool = Field(
        True, description="regression: the model predicts (target - mean) / deviation, both taken from Q"
    )

    @model_validator(mode="after")
    def _check_loss(self) -> "TaskSettings":
        if self.kind == "custom" and self.loss is None:
            raise ValueError("kind 'custom' needs a loss; set both")
        return self


class PublicSettings(Section):
    features: str = Field(
        "none",
        description="fixed feature map, fitted on Q: none, patches, scattering, model (the frozen first layers of your"
        " model), or package.module:callable",
    )
    filters: int = Field(1600, ge=2, le=100_000, description="patches: number of filters, which are patches of Q")
    patch: int = Field(6, ge=2, le=64, description="patches: side of a patch in pixels")
    pool: int = Field(
        3, ge=1, le=64, description="patches and scattering: features are averaged over a grid of pool × pool regions"
    )
    mirror: bool | None = Field(
        None, description="patches and scattering: average over left-right mirror images; default: for colour images"
    )
    components: int = Field(
        1000,
        ge=0,
        le=100_000,
        description="principal components of the features on Q; 0: all features, scaled to norm 1 only",
    )
    whitening: float = Field(
        0.5, ge=0, le=1, description="0: components keep their variances on Q; 1: all have the same"
    )
    start: Literal["none", "labels"] = Field(
        "none", description="initial models: none: random or zero; labels: trained on Q and its labels"
    )
    held_out: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="start=labels: fraction of Q that is kept for valuing messages and for the automatic learning rate",
    )

    @property
    def has_features(self) -> bool:
        return self.features != "none"


class BatchSettings(Section):
    size: int = Field(64, ge=1, description="batch size B; poisson: expected size for an average agent")
    rate: float | None = Field(
        None, gt=0, le=1, description="poisson: sampling rate q, a public constant; default size / records"
    )
    records: float | None = Field(
        None,
        ge=1,
        description="poisson: public record count of an average agent; default: that of a published data set",
    )
    sampler: Literal["poisson", "fixed"] = Field(
        "poisson", description="poisson: each record independently with rate q; fixed: B distinct records, uniformly"
    )

    @model_validator(mode="after")
    def _check_rate(self) -> "BatchSettings":
        if self.rate is not None and self.records is not None:
            raise ValueError("rate and records both set the sampling rate; leave one out")
        if self.sampler == "fixed" and (self.rate is not None or self.records is not None):
            raise ValueError("rate and records are for sampler 'poisson'; leave them out with 'fixed'")
        return self


class ScheduleSettings(Section):
    kind: Literal["constant", "step", "cosine"] = Field(
        "constant", description="learning rate over the rounds; step and cosine: it falls, see every, factor and final"
    )
    warmup: int = Field(0, ge=0, description="first rounds, in which the rate rises linearly to the learning rate")
    every: int = Field(30, ge=1, description="step: rounds between two falls")
    factor: float = Field(0.5, gt=0, le=1, description="step: factor on the rate at each fall")
    final: float = Field(0.0, ge=0, le=1, description="cosine: rate at the end, as a fraction of the learning rate")


class ShapleySettings(Section):
    estimator: Literal["auto", "exact", "montecarlo", "fast"] = Field(
        "auto",
        description="exact, montecarlo (Algorithm 2) or fast (mean of logits); auto: exact up to 5 members, else fast",
    )
    permutations: int = Field(20, ge=1, description="R, permutations for montecarlo (and for fast beyond 10 members)")
    orders: Literal["circular", "independent"] = Field(
        "circular",
        description="how permutations are drawn: circular (lower variance) or independent (paper)",
    )
    sample: int | None = Field(
        None, ge=1, description="records of Q evaluated in a round, drawn anew each round; default all"
    )
    check_every: int = Field(
        10, ge=0, description="fast: rounds between checks of a few coalitions against their true models; 0: never"
    )
    value: Literal["accuracy", "loss", "centred"] = Field(
        "centred",
        description="value of a model on Q: centred: minus loss with centred logits; loss: minus loss; accuracy:"
        " as in the paper",
    )
    step_fraction: float = Field(
        0.1, gt=0, description="step by which a message is valued, as a fraction of the largest learning rate; paper: 1"
    )
    empty_value: Literal["model", "zero"] = Field(
        "model", description="value of the empty coalition: that of the agent's model, or zero (paper)"
    )
    weighting: Literal["evidence", "contribution", "minmax", "uniform"] = Field(
        "evidence",
        description="evidence: less for members seen to do harm; contribution: also for members that send little about"
        " records; minmax: paper; uniform: equal weights, no valuation",
    )
    memory: float = Field(0.97, gt=0, lt=1, description="evidence: decay per round of the evidence from earlier rounds")
    floor: float = Field(
        0.0, ge=0, le=1, description="λ, the fraction that is always split equally: share = (1-λ)·φ̂/Σφ̂ + λ/k"
    )

    @model_validator(mode="after")
    def _check_empty_value(self) -> "ShapleySettings":
        if self.value != "accuracy" and self.empty_value == "zero":
            raise ValueError("empty_value 'zero' is the worst accuracy but the best loss; set value 'accuracy' with it")
        return self

    @model_validator(mode="after")
    def _check_sample(self) -> "ShapleySettings":
        if self.value == "centred" and self.sample == 1:
            raise ValueError(
                "value 'centred' subtracts the mean over the sample, which needs more than 1 record; try sample 100"
            )
        return self


DEFAULT_EPSILON = 8.0  # total ε if no amount of noise is set


class PrivacySettings(Section):
    mode: Literal["total", "per-round", "noise", "paper", "none"] = Field(
        "total",
        description="total: one total budget; per-round: an ε for each round; noise: σ as given; paper: σ by Theorem 1;"
        " none: no privacy",
    )
    target_epsilon: float | None = Field(
        None, gt=0, description=f"total ε of the whole run, to which σ is calibrated; default {DEFAULT_EPSILON:g}"
    )
    delta: float = Field(1e-5, gt=0, lt=1, description="δ of the whole run")
    clipping: Literal["per-sample", "batch"] = Field(
        "per-sample", description="per-sample: clip the gradient of each record; batch: of the whole batch (paper)"
    )
    max_grad_norm: float = Field(1.0, gt=0, description="clipping threshold C")
    noise_multiplier: float | None = Field(
        None, ge=0, description="advanced: set σ/(√k·Δ) directly; target_epsilon then only limits the budget"
    )
    sigma: float | None = Field(
        None, ge=0, description="advanced: set σ of every message directly; target_epsilon then only limits the budget"
    )
    epsilon_per_round: float | None = Field(
        None,
        gt=0,
        description="per-round: ε of one round by itself; paper: ε from which Theorem 1 computes σ",
    )
    phi_min: float | None = Field(
        None, gt=0, le=1, description="paper: minimum share φ̂_min in Theorem 1; default λ/k, see share_floor"
    )
    share_floor: float | None = Field(
        None, gt=0, le=1, description="paper: λ in Theorem 1's φ̂_min = λ/k; default: the algorithm's own floor"
    )
    randomness: Literal["seeded", "system"] = Field(
        "seeded", description="seeded: for simulation, not private; system: entropy of the operating system"
    )

    @model_validator(mode="after")
    def _check_amount(self) -> "PrivacySettings":
        amounts = ("noise_multiplier", "sigma", "epsilon_per_round")
        given = [name for name in amounts if getattr(self, name) is not None]
        if self.mode == "noise" and len(given) != 1:
            raise ValueError(
                f"mode 'noise' takes exactly one of {', '.join(amounts)} (given: {', '.join(given) or 'none'})"
            )
        if self.mode == "paper" and given != ["epsilon_per_round"]:
            raise ValueError("mode 'paper' computes σ by Theorem 1 from epsilon_per_round alone; set it, like 0.08")
        if self.mode == "per-round" and given != ["epsilon_per_round"]:
            raise ValueError("mode 'per-round' calibrates σ to epsilon_per_round alone; set it, like 0.08")
        if self.mode == "total" and "epsilon_per_round" in given:
            raise ValueError(
                "epsilon_per_round is for modes 'per-round' and 'paper'; mode 'total' takes a total, target_epsilon"
            )
        if self.mode == "total" and len(given) > 1:
            raise ValueError("noise_multiplier and sigma both set the amount of noise; give exactly one")
        return self

    @property
    def budget(self) -> float | None:
        """Total ε that no agent may exceed; None if only the amount of noise was given."""
        amount_given = self.mode != "total" or self.noise_multiplier is not None or self.sigma is not None
        return self.target_epsilon if amount_given else self.target_epsilon or DEFAULT_EPSILON


class AttackSettings(Section):
    label_flip: int = Field(0, ge=0, description="simulated attackers that train on flipped labels")
    gaussian: int = Field(
        0, ge=0, description="simulated attackers that send a random vector of norm C instead of a gradient"
    )
    free_rider: int = Field(0, ge=0, description="simulated attackers that send a zero gradient plus the usual noise")
    echo: int = Field(0, ge=0, description="simulated attackers that send another agent's last message, with noise")
    duplicate: int = Field(0, ge=0, description="simulated attackers that train on a copy of another agent's records")
    reversed_model: int = Field(
        0,
        ge=0,
        description="simulated attackers whose mixed models and momenta are reversed and 1,000 times as long",
    )
    constant_model: int = Field(
        0,
        ge=0,
        description="simulated attackers that always send the same random vector of norm 100 for mixing",
    )
    copied_model: int = Field(
        0, ge=0, description="simulated attackers that send a neighbour's model and momentum for mixing"
    )
    drifting_model: int = Field(
        0, ge=0, description="simulated attackers that shift their model by drift in every round, in a random direction"
    )
    drift: float = Field(1.0, gt=0, description="length of the shift of a drifting model per round")


class MixingSettings(Section):
    robust: bool = Field(
        False,
        description="limit neighbours' models to what honest ones can differ by; between organisations the default is"
        " true",
    )


class EngineSettings(Section):
    device: str = Field("cpu", description="torch device: cpu, cuda, cuda:1, mps")
    workers: int | None = Field(None, ge=1, description="single-threaded workers; default: one per core")
    exact: bool = Field(
        False, description="share no computation between agents: the same bits on any number of processes; cpu only"
    )
    timeout: float = Field(
        120.0, gt=0, description="several ranks: seconds to wait for another rank; must exceed the time of a round"
    )
