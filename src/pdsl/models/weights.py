"""Initial weights of a model in a safetensors file, which may come from others: everything is checked before use."""

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from pdsl.utils.errors import PdslError
from pdsl.utils.files import read_file

MAX_HEADER = 2**21  # bytes of names and shapes


def pack_weights(module: nn.Module) -> bytes:
    """All parameters and buffers of a module, named as in a module of the same layers without names."""
    return save({name: tensor.detach().cpu().clone().contiguous() for name, tensor in module.state_dict().items()})


def load_weights(module: nn.Module, path: Path, sha256: str | None = None) -> None:
    """Load a file of weights into a module; PdslError unless it has exactly the module's tensors, all finite.

    `sha256`: of the file, if it must be a certain one.
    """
    expected = module.state_dict()
    content = _read(path, MAX_HEADER + sum(t.numel() * t.element_size() for t in expected.values()))
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise PdslError(f"{path} does not have the agreed weights: its SHA-256 differs; request the file again")
    try:
        found = load(content)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as e:
        raise PdslError(f"{path} is not a safetensors file, or damaged; request it again") from e
    for name in sorted(expected.keys() | found.keys()):
        _check_tensor(name, expected.get(name), found.get(name), path)
    module.load_state_dict(found)


def _read(path: Path, limit: int) -> bytes:
    try:
        content = read_file(path, limit + 1)
    except OSError as e:
        raise PdslError(f"{path}: {e.strerror}; copy the file with the model's weights there") from e
    if len(content) > limit:
        raise PdslError(f"{path} has more than the {limit:,} bytes that the model's weights need; request it again")
    return content


def _check_tensor(name: str, expected: Tensor | None, found: Tensor | None, path: Path) -> None:
    if expected is None or found is None:
        fault = "is not in the model" if expected is None else "is missing"
        raise PdslError(f"{path}: the tensor {name!r:.80} {fault}; use the file that was written for this model")
    if expected.shape != found.shape or expected.dtype != found.dtype:
        raise PdslError(
            f"{path}: {name} is {found.dtype} {tuple(found.shape)}, and the model needs {expected.dtype}"
            f" {tuple(expected.shape)}; use the file that was written for this model"
        )
    if not bool(torch.isfinite(found).all()):
        raise PdslError(f"{path}: {name} has infinite or undefined numbers; request the file again")
