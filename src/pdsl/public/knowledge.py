"""All that a run takes from its public set Q: normalisation, features and a start."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from pdsl.data import Data
from pdsl.data.scaling import Scaling
from pdsl.models.network import Network
from pdsl.public.features import BUILT_IN, MODEL, FeatureMap, fit_features, split_frozen
from pdsl.public.patches import uses_mirror
from pdsl.public.start import train_on_public, with_start
from pdsl.settings import PublicSettings
from pdsl.utils.errors import PdslError
from pdsl.utils.inputs import AugmentedFields, Inputs, tensors_digest
from pdsl.utils.random import Streams
from pdsl.utils.types import JsonDict
from pdsl.utils.workers import Workers

Records = tuple[Inputs, Tensor]
MIN_PUBLIC = 4  # public records from which a start can be trained


@dataclass(frozen=True)
class PublicKnowledge:
    """Results of the public set, the same for all agents. They depend on Q and the settings only."""

    features: FeatureMap | None = None
    raw_shape: tuple[int, ...] | None = None  # of a record before the feature map; None: several tensors
    scaling: Scaling | None = None  # mean and deviation of Q, if inputs are standardised by them
    start: str | None = None  # digest of the initial parameters, if they were trained on Q
    public: Records | None = field(default=None, repr=False)  # all of Q, after the feature map
    model: nn.Module | None = field(default=None, repr=False)  # the user's model, with its frozen first layers
    raw: Data | None = field(default=None, repr=False)  # the data before normalisation and feature map, for an audit
    cold: Tensor | None = field(default=None, repr=False)  # [d] initial parameters before the start

    @property
    def uses(self) -> list[str]:
        """Purposes of the public set besides valuation, in words."""
        used = {"features": self.features, "normalisation": self.scaling, "start": self.start}
        return [name for name, value in used.items() if value]

    def as_dict(self) -> JsonDict:
        """Uses and digests, for setup.json."""
        scaling = None if self.scaling is None else tensors_digest([self.scaling.mean, self.scaling.deviation])
        features = None if self.features is None else self.features.digest
        digests = {"normalisation": scaling, "features": features, "start": self.start}
        return {"uses": self.uses, "digests": {name: digest for name, digest in digests.items() if digest}}


def learn_features(
    settings: PublicSettings,
    public: Inputs,
    model: nn.Module | None = None,
    code: str = "",
    device: str = "cpu",
    workers: int | None = None,
) -> tuple[FeatureMap | None, nn.Module | None]:
    """Fit the feature map to the public inputs. Returns it, and the model that is trained on the features.

    `code`: digest of a user's own code, which may be the feature map.
    """
    if not settings.has_features:
        return None, model
    if isinstance(public, AugmentedFields):
        raise PdslError("public.features: the data set has random transforms; leave one of them out")
    backbone = None
    if settings.features == MODEL:
        backbone, model = split_frozen(model)
    with Workers(workers) as pool:
        fitted = fit_features(settings, public, pool, device, backbone, "" if settings.features in BUILT_IN else code)
    return fitted, model


def apply_features(
    features: FeatureMap, data: Data, q: Records, test: Records, device: str = "cpu", workers: int | None = None
) -> tuple[Data, Records, Records]:
    """Data, public set and test set with features instead of inputs."""
    with Workers(workers) as pool:
        public, tested, own = (
            features.cached(inputs, pool, device, f"features of the {name} set")
            for inputs, name in ((q[0], "public"), (test[0], "test"), (data.x, "training"))
        )
    data = replace(data, x=own, test_x=tested, test_y=test[1], validation=(public, q[1]), features=())
    return data, (public, q[1]), (tested, test[1])


def start_from_public(
    settings: PublicSettings, network: Network, public: Records, knowledge: PublicKnowledge, key: str
) -> tuple[Network, PublicKnowledge, Records]:
    """Train the initial parameters on a part of the public set, if `public.start` says so.

    Returns the network, and the records that value messages: those that were not trained on, because a model fits
    records better that it was trained on, and every other model would seem worse on them.
    """
    if settings.start == "none":
        return network, knowledge, public
    trained = hold_out(len(public[1]), settings.held_out)
    x = train_publicly(settings, network, public, knowledge, key, trained)
    rest = torch.nonzero(~trained)[:, 0]
    knowledge = replace(knowledge, start=tensors_digest([x]), cold=network.initial_parameters())
    return with_start(network, x), knowledge, (public[0][rest], public[1][rest])


def hold_out(records: int, fraction: float) -> Tensor:  # [records] bool
    """The public records that a start is trained on; at least one is, and at least two are held out."""
    if records < MIN_PUBLIC:
        raise PdslError(f"public.start=labels needs at least {MIN_PUBLIC} public records, not {records}; leave it out")
    trained = torch.ones(records, dtype=torch.bool)
    count = min(records - 1, max(2, round(fraction * records)))
    trained[torch.from_numpy(Streams(0).generator("public/held-out").permutation(records)[:count])] = False
    return trained


def train_publicly(
    settings: PublicSettings,
    network: Network,
    public: Records,
    knowledge: PublicKnowledge,
    key: str,
    chosen: Tensor | None = None,
) -> Tensor:
    """Parameters [d] trained on the public set alone. Images get random variants, or features of variants.

    `key`: digest of the model. `chosen` [records] bool: the public records to train on; default all.
    """
    inputs, targets = public
    record, features = torch.arange(len(targets)), knowledge.features
    if features is not None and features.variants is not None:
        inputs, record = features.variants
    if chosen is not None:
        rows = torch.nonzero(chosen[record])[:, 0]
        inputs, record = inputs[rows], record[rows]
    raw = torch.Size(knowledge.raw_shape or ())
    augmented = features is None and len(raw) == 3 and isinstance(inputs, Tensor) and inputs.is_floating_point()
    mirror = len(raw) == 3 and uses_mirror(settings, raw)
    return train_on_public(network, inputs, targets[record], record, augmented, mirror, key)
