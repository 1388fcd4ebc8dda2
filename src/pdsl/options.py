"""Settings as keyword arguments in Python: typed mappings for the sections of a config, and constructors of tasks.

A mapping has the names of its section, so that an editor completes them: `privacy={"target_epsilon": 4}`. All are
optional. `pdsl config` explains them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from pdsl.settings import TaskSettings

ClassWeights = Literal["public"] | Sequence[float] | Mapping[str, float]


class PrivacyOptions(TypedDict, total=False):
    mode: Literal["total", "per-round", "noise", "paper", "none"]
    target_epsilon: float | None
    delta: float
    clipping: Literal["per-sample", "batch"]
    max_grad_norm: float
    noise_multiplier: float | None
    sigma: float | None
    epsilon_per_round: float | None
    phi_min: float | None
    share_floor: float | None
    randomness: Literal["seeded", "system"]


class PublicOptions(TypedDict, total=False):
    features: str
    filters: int
    patch: int
    pool: int
    mirror: bool | None
    components: int
    whitening: float
    start: Literal["none", "labels"]
    held_out: float


class BatchOptions(TypedDict, total=False):
    size: int
    rate: float | None
    records: float | None
    sampler: Literal["poisson", "fixed"]


class PartitionOptions(TypedDict, total=False):
    kind: Literal["dirichlet", "iid", "shards", "quantity", "natural"]
    mu: float
    classes: int
    minimum: int


class GraphOptions(TypedDict, total=False):
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
    ]
    agents: int
    degree: int
    probability: float
    k: int
    seed: int | None
    path: str | None


class ModelOptions(TypedDict, total=False):
    name: str
    channels: tuple[int, int] | None
    hidden: int | None
    activation: Literal["relu", "tanh"] | None
    norm: Literal["none", "rms", "centred"]
    layers: Sequence[Mapping[str, Any]] | None
    weights_path: str | None
    weights_sha256: str | None


class TaskOptions(TypedDict, total=False):
    kind: Literal["auto", "multiclass", "binary", "multilabel", "regression", "custom"]
    loss: str | None
    metric: str | None
    class_weights: ClassWeights | None
    label_smoothing: float
    huber: float | None
    standardise_targets: bool


class AttackOptions(TypedDict, total=False):
    label_flip: int
    gaussian: int
    free_rider: int
    echo: int
    duplicate: int
    reversed_model: int
    constant_model: int
    copied_model: int
    drifting_model: int
    drift: float


class MixingOptions(TypedDict, total=False):
    robust: bool


class EngineOptions(TypedDict, total=False):
    device: str
    workers: int | None
    exact: bool
    timeout: float


def multiclass(*, class_weights: ClassWeights | None = None, label_smoothing: float = 0.0) -> TaskSettings:
    """Classification into two or more classes, one score per class.

    Args:
        class_weights: weight of each class in the loss, by number or name; "public": balanced by counts in Q.
        label_smoothing: share of a target spread over all classes.
    """
    return _classes("multiclass", class_weights, label_smoothing)


def binary(*, class_weights: ClassWeights | None = None, label_smoothing: float = 0.0) -> TaskSettings:
    """Two classes, one logit."""
    return _classes("binary", class_weights, label_smoothing)


def multilabel(*, class_weights: ClassWeights | None = None, label_smoothing: float = 0.0) -> TaskSettings:
    """Several yes-or-no labels per record, one logit each. `class_weights`: weights of positive labels."""
    return _classes("multilabel", class_weights, label_smoothing)


def regression(*, huber: float | None = None, standardise_targets: bool = True) -> TaskSettings:
    """Numbers.

    Args:
        huber: error above which the loss is linear; default squared error.
        standardise_targets: the model predicts (target - mean) / deviation, both taken from the public set Q.
    """
    given = {"kind": "regression", "huber": huber, "standardise_targets": standardise_targets}
    return TaskSettings.build("task", given)


def _classes(kind: str, class_weights: ClassWeights | None, label_smoothing: float) -> TaskSettings:
    given = {"kind": kind, "class_weights": class_weights, "label_smoothing": label_smoothing}
    return TaskSettings.build("task", given)
