"""A torch module as a function of a flat parameter vector."""

import copy
import threading
from collections import deque
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from pdsl.models.zoo import MIXES_RECORDS, AlignedLinear
from pdsl.utils.errors import PdslError

EVALUATION_BLOCK = 250  # records per forward pass: few calls from Python, and little memory


class Replica:
    """A copy of the module for one thread. `flat` and the module's parameters share memory."""

    def __init__(self, module: nn.Module, device: torch.device):
        self.module = copy.deepcopy(module).to(device).eval()
        for layer in self.module.modules():
            AlignedLinear.replace(layer)
        parameters = list(self.module.parameters())
        self.flat = torch.cat([p.detach().reshape(-1) for p in parameters])
        at = 0
        for p in parameters:
            p.data = self.flat[at : at + p.numel()].view(p.shape)
            at += p.numel()
        self.parameters = parameters
        self.state = _fingerprint_state(self.module)

    def load(self, x: Tensor) -> nn.Module:
        """Set the parameters to x [d] and return the module."""
        self.flat.copy_(x)
        return self.module


def _fingerprint_state(module: nn.Module) -> dict[str, object]:
    """Fingerprint all state that a module could keep between calls: buffers and attributes of all its layers."""
    own = vars(nn.Module()).keys() - {"_buffers"}
    return {
        f"{name}.{key}".lstrip("."): _fingerprint(value)
        for name, layer in module.named_modules()
        for key, value in vars(layer).items()
        if key not in own
    }


def _fingerprint(value: object, depth: int = 3) -> object:
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        return value
    if depth and isinstance(value, Mapping):
        return [(key, _fingerprint(item, depth - 1)) for key, item in value.items()]
    if depth and isinstance(value, list | tuple | set | frozenset | deque):
        return [_fingerprint(item, depth - 1) for item in value]
    return id(value)


class Network:
    """A module's architecture, evaluated at any flat parameter vector. Thread-safe.

    The module runs in evaluation mode. Dropout is off, because it draws from a global random generator, which would
    make runs irreproducible. BatchNorm uses the statistics of the current batch, and is refused where records must not
    mix.
    """

    def __init__(self, module: nn.Module, device: str = "cpu"):
        self.device = torch.device(device)
        if any(nn.parameter.is_lazy(t) for t in (*module.parameters(), *module.buffers())):
            raise PdslError("the model has uninitialised lazy layers; run it once on a batch first")
        self.module = copy.deepcopy(module).eval()
        for layer in self.module.modules():
            if isinstance(layer, nn.modules.batchnorm._NormBase):
                layer.running_mean = layer.running_var = layer.num_batches_tracked = None
            if getattr(layer, "inplace", False):
                setattr(layer, "inplace", False)  # noqa: B010  gradients need a layer's output after the next layer has run
        self.num_parameters = sum(p.numel() for p in self.module.parameters())
        if self.num_parameters == 0:
            raise PdslError("the model has no parameters to train")
        if any(p.dtype != torch.float32 for p in self.module.parameters()):
            raise PdslError("the model's parameters must all be float32; try model.float()")
        if not all(p.requires_grad for p in self.module.parameters()):
            raise PdslError(
                "the model has frozen parameters, which noise and gossip would change; use register_buffer for them"
            )
        self._local = threading.local()

    @property
    def mixes_records(self) -> str | None:
        """Name of a layer in which the records of a batch affect each other, if there is one."""
        return next((type(m).__name__ for m in self.module.modules() if isinstance(m, MIXES_RECORDS)), None)

    def initial_parameters(self) -> Tensor:
        """Parameters of the module as a flat vector x⁰ [d]."""
        return torch.cat([p.detach().reshape(-1) for p in self.module.parameters()]).to(self.device)

    def perturbed_parameters(self) -> Tensor:
        """Parameters [d] other than the initial ones, at which a last layer of zeros would hide all other gradients."""
        x = self.initial_parameters()
        return x + 0.05 * torch.arange(self.num_parameters, device=x.device).sin()

    def replica(self) -> Replica:
        """The replica of this thread."""
        if not hasattr(self._local, "replica"):
            self._local.replica = Replica(self.module, self.device)
        return self._local.replica  # type: ignore[no-any-return]

    def check_state(self) -> None:
        """Raise PdslError if a buffer or an attribute of this thread's replica has changed since it was created."""
        replica = self.replica()
        now = _fingerprint_state(replica.module)
        if now != replica.state:
            changed = next(key for key in now.keys() | replica.state.keys() if now.get(key) != replica.state.get(key))
            raise PdslError(
                f"the model keeps state between calls: '{changed.replace('._buffers', ' (a buffer)')}' changes in"
                " forward, so the gradient of a record depends on others; make forward stateless"
            )

    @torch.no_grad()
    def logits(self, x: Tensor, inputs: Tensor) -> Tensor:
        """Logits [n, classes] of the model with parameters x [d]."""
        module = self.replica().load(x)
        blocks = torch.tensor_split(inputs, -(-len(inputs) // EVALUATION_BLOCK))  # even: BatchNorm refuses 1 record
        return torch.cat([module(channels_last(block)) for block in blocks])

    def check(self, inputs: Tensor, classes: int) -> None:
        """Run the model once, so that a mismatch of shapes is found before anything is written."""
        try:
            out = self.logits(self.initial_parameters(), inputs[:2].to(self.device))
        except (RuntimeError, TypeError, ValueError, IndexError) as e:
            first_line = next(iter(str(e).splitlines()), type(e).__name__)
            raise PdslError(
                f"the model does not accept records of shape {tuple(inputs.shape[1:])}: {first_line}"
            ) from e
        if out.ndim != 2 or out.shape[1] < classes:
            raise PdslError(
                f"the model returns an output of shape {tuple(out.shape[1:])} per record; {classes} classes need"
                f" a vector of at least {classes} scores"
            )

    def to_module(self, x: Tensor) -> nn.Module:
        """Copy of the module with parameters x [d]."""
        module = copy.deepcopy(self.module)
        nn.utils.vector_to_parameters(x.detach().cpu(), module.parameters())
        return module

    def shapes(self) -> Iterator[tuple[str, torch.Size]]:
        """Names and shapes of the parameters, in the order of the flat vector."""
        return ((name, p.shape) for name, p in self.module.named_parameters())


def channels_last(inputs: Tensor) -> Tensor:
    """Convert images to the layout (row, column, channel), the fastest on CPUs; other records are not changed.

    `to` also sets the strides of one-channel images, which `contiguous` would not. A convolution chooses the layout of
    its output by them.
    """
    if inputs.ndim != 4:
        return inputs
    return inputs.to(memory_format=torch.channels_last)


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Fraction of records whose label has the largest logit."""
    return (logits.argmax(-1) == labels).double().mean().item()
