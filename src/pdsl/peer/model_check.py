"""Checks of the model in a plan, which run no code that the plan names and allocate no tensor."""

import math

import torch

from pdsl.config import Config
from pdsl.models.architecture import MAX_PARAMETERS, Trace, build, has_frozen, parse, takes_integers, trace, walk
from pdsl.models.zoo import MODELS
from pdsl.public.features import BUILT_IN, MODEL, count_features, split_frozen
from pdsl.settings import PublicSettings
from pdsl.utils.errors import PdslError

Shape = tuple[int, ...]


def check_model(config: Config, shape: Shape, public_records: int) -> None:
    """Refuse a model that members cannot share as data or as installed code, or whose sizes do not fit."""
    model, features = config.model, config.public.features
    if model.weights_path is not None:
        raise PdslError("plan: model.weights_path is a path on one machine; a plan has model.weights_sha256")
    if model.layers is None and model.name not in MODELS and ":" not in model.name:
        raise PdslError(
            f"plan: model.name={model.name!r:.60} is not built in; choose {', '.join(MODELS)}, or give layers"
            " (pdsl peer invite --model) or installed code (package.module:callable)"
        )
    if config.public.has_features and features not in (*BUILT_IN, MODEL) and ":" not in features:
        raise PdslError(
            f"plan: public.features={features!r:.60} is unknown; choose none, {', '.join(BUILT_IN)}, {MODEL}"
        )
    if features == MODEL and model.name in MODELS:
        raise PdslError(f"plan: public.features={MODEL} needs a model with frozen first layers; give it with --model")
    if features in BUILT_IN:
        _check_map(config.public, shape)
    if model.layers is not None:
        _check_layers(config, shape, public_records)


def _check_map(public: PublicSettings, shape: Shape) -> None:
    """Refuse a built-in feature map with more numbers than a model may have; images of other shapes are refused later.

    The numbers are those of filters or wavelets, of averages over regions, and of the projection.
    """
    pixels, channels = math.prod(shape[1:]), shape[0]
    filters = public.filters * public.patch**2 * channels if public.features == "patches" else 32 * pixels
    features = public.pool**2 * (2 * public.filters if public.features == "patches" else 256 * channels)
    if (numbers := filters + public.pool**2 * pixels + features * max(1, public.components)) > MAX_PARAMETERS * 10:
        raise PdslError(
            f"plan: the feature map of public.features={public.features} has up to {numbers:,} numbers, and"
            f" {MAX_PARAMETERS * 10:,} are allowed; lower filters, pool or components"
        )


def _check_layers(config: Config, shape: Shape, public_records: int) -> None:
    layers = parse(config.model.layers, "plan: model.layers")
    if has_frozen(layers) and config.model.weights_sha256 is None:
        raise PdslError("plan: model.layers has frozen layers without weights; set model.weights_sha256")
    parts = split_at_features(config, shape, public_records)
    if parts and parts[-1].trained == 0:
        raise PdslError("plan: model.layers has no parameters to train; give at least one layer that is not frozen")


def split_at_features(config: Config, shape: Shape, public_records: int) -> list[Trace]:
    """Traces of the layers: of the whole model, or of the frozen first layers and of the rest, if these are features.

    Empty if the shape of the features depends on code that the plan names.
    """
    layers, public, where = parse(config.model.layers, "plan: model.layers"), config.public, "plan: model.layers"
    if not public.has_features:
        return [trace(layers, shape, where)]
    if public.features in BUILT_IN:
        return [trace(layers, (count_features(public, torch.Size(shape), public_records),), where)]
    if public.features != MODEL:
        return []
    frozen = len(list(split_frozen(build(layers, "meta"))[0].children()))
    if frozen == len(layers):
        raise PdslError("plan: model.layers has no layer to train after its frozen ones; add a head")
    backbone = trace(layers[:frozen], shape, where)
    size = torch.Size(backbone.output).numel()
    kept = min(public.components, size, public_records - 1) if public.components else size
    return [backbone, trace(layers[frozen:], (kept,), f"{where} after {frozen} frozen layers")]


def needs_integers(config: Config) -> bool:
    """Whether records are whole numbers, because the model starts with an embedding."""
    return config.model.layers is not None and takes_integers(parse(config.model.layers))


def count_ids(config: Config) -> int:
    """Rows of the embedding with which the model starts."""
    layers = walk(parse(config.model.layers))
    return int(next(layer.arguments["num_embeddings"] for layer in layers if layer.type == "Embedding"))
