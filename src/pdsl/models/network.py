"""A torch module as a function of a flat parameter vector."""

import copy
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from pdsl.models.zoo import MIXES_RECORDS, AlignedLinear
from pdsl.tasks import Loss, MultiClass, Task
from pdsl.utils.errors import PdslError
from pdsl.utils.inputs import Inputs, call, channels_last, describe_shape, tensors_of

CLASSIFICATION = MultiClass()
TRIED = 8  # public records on which model and loss are tried
BYTES = 64  # alignment of memory
EVALUATION_BLOCK = 250  # records per forward pass: few calls from Python, and little memory


class Replica:
    """A copy of the module for one thread. `flat` and the module's parameters share memory."""

    def __init__(self, module: nn.Module, device: torch.device):
        self.module = copy.deepcopy(module).to(device).eval()
        for layer in self.module.modules():
            AlignedLinear.replace(layer)
            if isinstance(layer, nn.TransformerEncoder):
                layer.use_nested_tensor = False  # packs records of different lengths, which vmap cannot trace
        parameters = trainable(self.module)
        self.flat = torch.cat([p.detach().reshape(-1) for p in parameters])
        at = 0
        for p in parameters:
            p.data = self.flat[at : at + p.numel()].view(p.shape)
            at += p.numel()
        self.parameters = parameters
        self.state = _fingerprint_state(self.module)
        self.copied: set[str] = set()  # trained parameters that have no formula for per-record gradients
        self.plans: dict[object, object] = {}  # of passes, see gradients.plan

    def load(self, x: Tensor) -> nn.Module:
        """Set the parameters to x [d] and return the module."""
        self.flat.copy_(x)
        return self.module

    def aligned(self, x: Tensor) -> Tensor:
        """x [d], or a copy unless its memory is aligned like the parameters', because rounding may depend on that."""
        if x.dtype == self.flat.dtype and x.is_contiguous() and x.data_ptr() % BYTES == self.flat.data_ptr() % BYTES:
            return x
        return self.flat.copy_(x)


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


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that are trained. Frozen ones (requires_grad=False) are neither sent nor clipped nor noised."""
    return [p for p in module.parameters() if p.requires_grad]


def load_vector(module: nn.Module, x: Tensor) -> None:
    """Set the trained parameters of a module to the vector x [d]."""
    nn.utils.vector_to_parameters(x.detach().cpu().float(), trainable(module))


def main_output(out: object) -> Tensor:
    """The tensor of a model's output: the output itself, its `logits`, or the first item of a tuple."""
    if isinstance(out, Mapping) and "logits" in out:
        out = out["logits"]
    elif not isinstance(out, Tensor) and hasattr(out, "logits"):
        out = out.logits
    elif isinstance(out, tuple | list) and out:
        out = out[0]
    if not isinstance(out, Tensor):
        raise PdslError(
            f"the model returns a {type(out).__name__}; return a tensor, a mapping or object with `logits`, or a tuple"
            " that starts with them"
        )
    return out


@torch.no_grad()
def run_in_blocks(module: nn.Module, inputs: Inputs) -> Tensor:
    """Outputs [n, ...] of a module for many records."""
    blocks = max(1, -(-len(inputs) // EVALUATION_BLOCK))
    size, larger = divmod(len(inputs), blocks)  # even blocks: BatchNorm refuses 1 record
    ends = [0, *accumulate(size + (b < larger) for b in range(blocks))]
    return torch.cat([main_output(call(module, channels_last(inputs[a:b]))) for a, b in pairwise(ends)])


def is_frozen(layer: nn.modules.batchnorm._NormBase) -> bool:
    """Whether the layer has frozen weights and running statistics: it then treats every record independently."""
    own = list(layer.parameters(recurse=False))
    return layer.running_mean is not None and bool(own) and not any(p.requires_grad for p in own)


def _fill_running_statistics(module: nn.Module, public: Inputs) -> None:
    """Set the running statistics of normalisation layers to means over blocks of public records."""
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    layers = [m for m in norms if m.track_running_stats and not is_frozen(m)]
    if not layers:
        return
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.running_mean, layer.running_var = torch.zeros(layer.num_features), torch.ones(layer.num_features)
        layer.num_batches_tracked = torch.tensor(0)
        layer.momentum = None  # the mean over all blocks
        layer.train()
    run_in_blocks(module, public)
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
        layer.eval()


class Network:
    """A module's architecture with a task's loss, evaluated at any flat parameter vector. Thread-safe.

    The vector has the trainable parameters only. Frozen parameters and buffers keep the values of the given module.

    The module runs in evaluation mode. Dropout is off, because it draws from a global random generator, which would
    make runs irreproducible. BatchNorm uses the statistics of the current batch, and is refused where records must not
    mix; a frozen one uses its running statistics.
    """

    def __init__(self, module: nn.Module, device: str = "cpu", task: Task = CLASSIFICATION):
        self.device = torch.device(device)
        self.task = task
        if any(nn.parameter.is_lazy(t) for t in (*module.parameters(), *module.buffers())):
            raise PdslError("the model has uninitialised lazy layers; run it once on a batch first")
        self.module = copy.deepcopy(module).eval()
        for layer in self.module.modules():
            if isinstance(layer, nn.modules.batchnorm._NormBase) and not is_frozen(layer):
                layer.running_mean = layer.running_var = layer.num_batches_tracked = None  # see `to_module`
            if getattr(layer, "inplace", False):
                setattr(layer, "inplace", False)  # noqa: B010  gradients need a layer's output after the next layer has run
        self.num_parameters = sum(p.numel() for p in trainable(self.module))
        if self.num_parameters == 0:
            some = next(self.module.parameters(), None) is not None
            raise PdslError(f"the model has no parameters to train{'; all are frozen' if some else ''}")
        if any(p.dtype != torch.float32 for p in trainable(self.module)):
            raise PdslError("the model's trained parameters must all be float32; try model.float()")
        self._local = threading.local()

    @property
    def mixes_records(self) -> str | None:
        """Name of a layer in which the records of a batch affect each other, if there is one."""
        mixing = (m for m in self.module.modules() if isinstance(m, MIXES_RECORDS) and not is_frozen(m))
        return next((type(m).__name__ for m in mixing), None)

    def initial_parameters(self) -> Tensor:
        """Parameters of the module as a flat vector x⁰ [d]."""
        return torch.cat([p.detach().reshape(-1) for p in trainable(self.module)]).to(self.device)

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

    def forward(self, module: nn.Module, inputs: Inputs) -> Tensor:
        """Outputs [n, ...] of a replica's module."""
        return main_output(call(module, inputs))

    def losses(self, module: nn.Module, inputs: Inputs, targets: Tensor) -> Tensor:
        """Loss of each record [n]."""
        return self.task.losses(self.forward(module, inputs), targets)

    @torch.no_grad()
    def outputs(self, x: Tensor, inputs: Inputs) -> Tensor:
        """Outputs [n, ...] of the model with parameters x [d]."""
        return run_in_blocks(self.replica().load(x), inputs)

    def try_outputs(self, inputs: Inputs) -> Tensor:
        """Outputs of the initial model; PdslError if the model does not accept the records."""
        try:
            out = self.outputs(self.initial_parameters(), inputs.to(self.device))
        except (RuntimeError, TypeError, ValueError, IndexError) as e:
            first_line = next(iter(str(e).splitlines()), type(e).__name__)
            integers = any(not tensor.is_floating_point() for tensor in tensors_of(inputs))
            hint = "; integers stay integers: give floats, x.float(), if the model needs them" if integers else ""
            rows = [m.num_embeddings for m in self.module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
            if isinstance(e, IndexError) and integers and rows:
                sizes = " and ".join(str(n) for n in dict.fromkeys(rows))
                hint = f"; an integer has no row in an nn.Embedding of {sizes} rows: give 0 to num_embeddings - 1"
            raise PdslError(
                f"the model does not accept records of shape {describe_shape(inputs)}: {first_line}{hint}"
            ) from e
        if out.ndim == 0 or len(out) != len(inputs):
            raise PdslError(
                f"the model returns an output of shape {list(out.shape)} for {len(inputs)} records; return a row per"
                " record"
            )
        return out

    def count_outputs(self, inputs: Inputs) -> int:
        """Numbers that the model returns per record."""
        return self.try_outputs(inputs[:2])[0].numel()

    def check(self, inputs: Inputs, targets: Tensor) -> None:
        """Run the model once, so that a mismatch of shapes is found before anything is written."""
        out = self.try_outputs(inputs[:TRIED])
        some = targets[:TRIED].to(self.device)
        self.task.check(out, some)
        if self.task.loss is not None:
            check_loss(self.task.loss, out, some)

    def to_module(self, x: Tensor, public: Inputs | None = None) -> nn.Module:
        """Copy of the module with parameters x [d].

        Running statistics of normalisation layers, which training does not have, are those of `public` records.
        """
        module = copy.deepcopy(self.module)
        load_vector(module, x)
        if public is not None:
            _fill_running_statistics(module, public)
        return module

    def shapes(self) -> Iterator[tuple[str, torch.Size]]:
        """Names and shapes of the trained parameters, in the order of the flat vector."""
        return ((name, p.shape) for name, p in self.module.named_parameters() if p.requires_grad)


def check_loss(loss: Loss, outputs: Tensor, targets: Tensor) -> None:
    """Raise PdslError unless a loss has one number per record, which depends on that record only."""
    shapes = f"outputs {list(outputs.shape)}, targets {list(targets.shape)}"
    try:
        together = loss(outputs, targets)
    except Exception as e:  # a user's function may raise anything
        raise PdslError(f"loss: {e} ({shapes}); for one output take outputs[:, 0], and targets.float() for BCE") from e
    if not isinstance(together, Tensor) or together.shape != targets.shape[:1]:
        shape = list(together.shape) if isinstance(together, Tensor) else type(together).__name__
        raise PdslError(
            f"loss: it returned {shape} for {len(targets)} records ({shapes}); return one number per record, for"
            " example with reduction='none'"
        )
    apart = torch.cat([loss(outputs[n : n + 1], targets[n : n + 1]) for n in range(len(targets))])
    if not torch.allclose(together, apart, rtol=1e-3, atol=1e-6, equal_nan=True):
        raise PdslError("loss: a record's loss depends on the other records of the batch; use one record only")
