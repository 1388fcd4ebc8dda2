"""model.safetensors: the mean model with metadata, from which `pdsl.load` builds it again without data.

The metadata hold public values only: architecture, shape of a record, columns with their declared
categories, scaling constants, class names and task.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor, nn

from pdsl.data.scaling import Scaling
from pdsl.models.architecture import build as build_layers
from pdsl.models.architecture import parse as parse_layers
from pdsl.models.zoo import MODELS, build_architecture
from pdsl.public.features import MODEL as FROZEN
from pdsl.public.features import load_map, split_frozen
from pdsl.runs.directory import FEATURES
from pdsl.runs.prediction import Predictor, has_floats, raw_shape, schema_of
from pdsl.settings import ModelSettings, PublicSettings
from pdsl.tasks import Binary, CustomTask, MultiClass, MultiLabel, Regression, Task
from pdsl.training.experiment import Experiment
from pdsl.utils.errors import PdslError
from pdsl.utils.files import read_file
from pdsl.utils.imports import import_path
from pdsl.utils.inputs import describe_shape
from pdsl.utils.types import JsonDict
from pdsl.utils.versions import versions

TASKS: dict[str, type[Task]] = {kind.kind: kind for kind in (MultiClass, Binary, MultiLabel, Regression, CustomTask)}


def pack_model(e: Experiment, module: nn.Module) -> bytes:
    """Content of model.safetensors. Tensors with several names are stored once, as `save_model` of safetensors does."""
    names: dict[tuple[object, ...], str] = {}
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in sorted(module.state_dict().items()):
        key = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        if key in names:
            aliases[name] = names[key]
        else:
            names[key] = name
            tensors[name] = tensor.clone().contiguous()
    described = describe_model(e, module) | {"aliases": aliases}
    # one entry: safetensors writes several in a random order, and equal runs have equal files
    return save(tensors, metadata={"pdsl": json.dumps(described, ensure_ascii=False)})


def pack_initial_weights(module: nn.Module) -> bytes:
    """Weights and buffers before round 1."""
    return save({name: tensor.clone().contiguous() for name, tensor in module.state_dict().items()})


def restore_initial_weights(module: nn.Module, stored: bytes | None) -> nn.Module:
    """Copy of a module with the weights with which its run started; the module itself if they do not fit."""
    if stored is None:
        return module
    again = copy.deepcopy(module)
    try:
        again.load_state_dict(load(stored), strict=False)
    except (SafetensorError, RuntimeError):  # another model, which the seal refuses
        return module
    return again


def describe_model(e: Experiment, module: nn.Module) -> JsonDict:
    """Everything that predictions need besides the weights, as plain values."""
    x, task, scaling = e.test[0], e.task, e.data.scaling
    architecture = e.config.model.model_dump(mode="json", exclude_none=True, exclude={"weights_path"})
    architecture |= {"class": import_path(type(module)) or type(module).__qualname__}
    return {
        "architecture": architecture,
        "input": describe_shape(x) if e.public.features is None else str(e.public.raw_shape),
        "shape": None if (shape := raw_shape(e)) is None else list(shape),
        "floats": has_floats(e),
        "scaling": None if scaling is None else scaling.as_dict(),
        "columns": {name: list(categories) for name, categories in schema_of(e).items()},
        "classes": list(e.data.class_names),
        "task": describe_task(task),
        "features": None if e.public.features is None else e.config.public.model_dump(mode="json", exclude_none=True),
        "feature_count": None if e.public.features is None else e.public.features.size,
        "versions": versions(),
    }


def describe_task(task: Task) -> JsonDict:
    described: JsonDict = {"kind": task.kind, "outputs": task.outputs}
    if isinstance(task, Regression) and task.mean is not None and task.scale is not None:
        described |= {"mean": task.mean.tolist(), "scale": task.scale.tolist()}
    return described


def _read_task(described: JsonDict) -> Task:
    kind, outputs = TASKS[described["kind"]], int(described["outputs"])
    if kind is Regression and "mean" in described:
        return Regression(outputs, mean=torch.tensor(described["mean"]), scale=torch.tensor(described["scale"]))
    return CustomTask(outputs) if kind is CustomTask else kind(outputs)


def read_metadata(file: Path) -> JsonDict:
    """Metadata of a model file; PdslError if the file is missing or damaged."""
    try:
        with safe_open(file, framework="pt") as stored:
            found: Any = json.loads((stored.metadata() or {})["pdsl"])
    except FileNotFoundError as e:
        raise PdslError(f"{file.parent} has no {file.name}: the run is not finished; continue it first") from e
    except (SafetensorError, OSError, KeyError, ValueError) as e:
        raise PdslError(f"{file} is damaged, or of an older version of pdsl ({e})") from e
    described: JsonDict = found
    return described


def build_module(file: Path, metadata: JsonDict, given: nn.Module | None) -> nn.Module:
    """The module of a model file: built in, named by a path, or `given`; with the stored weights."""
    if (metadata.get("features") or {}).get("features") == FROZEN:
        full = _full_layers(metadata) if given is None else given
        given = None if full is None else split_frozen(full)[1]
    module = _architecture(file, metadata) if given is None else copy.deepcopy(given)
    load_weights(file, metadata, module)
    return module.eval()


def _full_layers(metadata: JsonDict) -> nn.Module | None:
    """The layers of a model that was given as data, its frozen first layers included; None for other models."""
    layers = metadata["architecture"].get("layers")
    return None if layers is None else build_layers(parse_layers(layers))


def _architecture(file: Path, metadata: JsonDict) -> nn.Module:
    stored = {name: value for name, value in metadata["architecture"].items() if name != "class"}
    settings = ModelSettings.model_validate(stored)
    if settings.name in MODELS or settings.layers is not None or ":" in settings.name:
        count = metadata.get("feature_count")
        shape = torch.Size(metadata["shape"] or () if count is None else [count])
        return build_architecture(settings, shape, metadata["task"]["outputs"])
    kind = metadata["architecture"]["class"].rpartition(":")[2]
    raise PdslError(
        f"the model of {file.parent} was an object given in Python, of class {metadata['architecture']['class']};"
        f" pass one with the same layers: pdsl.load({str(file.parent)!r}, model={kind}(...))"
    )


def read_features(file: Path, metadata: JsonDict, given: nn.Module | None) -> nn.Module | None:
    """The feature map beside a model file, if the model has one. `given`: the user's model with its frozen layers."""
    if metadata.get("features") is None:
        return None
    settings = PublicSettings.model_validate(metadata["features"])
    path = file.with_name(FEATURES)
    try:
        weights = load(read_file(path))
    except (OSError, SafetensorError) as e:
        raise PdslError(f"{path} is missing or damaged; copy it from where the run was made") from e
    full = _full_layers(metadata) if given is None else given
    backbone = split_frozen(full)[0] if settings.features == FROZEN else None
    return load_map(settings, torch.zeros(1, *(metadata["shape"] or ())), weights, backbone)


def load_weights(file: Path, metadata: JsonDict, module: nn.Module) -> None:
    """Load the stored weights into a module; PdslError unless they fit."""
    with safe_open(file, framework="pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  not a dict
    tensors |= {name: tensors[kept] for name, kept in metadata["aliases"].items()}
    try:
        module.load_state_dict(tensors)
    except RuntimeError as e:
        first = " ".join(str(e).split())
        raise PdslError(f"the weights of {file} do not fit the model: {first:.300}; pass the model of the run") from e


def read_class_names(metadata: JsonDict) -> tuple[str, ...]:
    """Names of the classes or labels; their numbers if they have none, and () for regression."""
    kind, outputs = metadata["task"]["kind"], int(metadata["task"]["outputs"])
    count = {"multiclass": outputs, "binary": 2, "multilabel": outputs}.get(kind, 0)
    return tuple(metadata["classes"]) or tuple(str(c) for c in range(count))


def read_predictor(metadata: JsonDict, module: nn.Module, features: nn.Module | None = None) -> Predictor:
    scaling = metadata["scaling"]
    return Predictor(
        module,
        _read_task(metadata["task"]),
        metadata["classes"],
        None if scaling is None else Scaling.from_dict(scaling),
        metadata["shape"],
        metadata["floats"],
        {name: tuple(categories) for name, categories in metadata.get("columns", {}).items()},
        features,
    )
