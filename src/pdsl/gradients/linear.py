"""Linear layers with a formula for per-record gradients; other layers are built from it."""

from torch import Tensor
from torch.nn.functional import pad

from pdsl.gradients.formulas import Gradient, Products, Rows, Vectors
from pdsl.gradients.tape import Tape
from pdsl.models.zoo import aligned_linear


def run_linear(
    tape: Tape, weight: Tensor, bias: Tensor | None, x: Tensor, part: tuple[int, int] | None = None
) -> Tensor:
    """x Wᵀ + b over the last dimension of x [n, ..., in].

    With part = (first, count), only these outputs: rows of the bias, and of the weight unless that has `count` rows.
    """
    if x.ndim < 2:
        raise RuntimeError("a linear layer needs records with features")
    first, count = part or (0, len(weight))
    of = len(weight) if len(weight) != count else 0
    w = weight.detach()[first : first + count] if of else weight.detach()
    b = None if bias is None else bias.detach()[first : first + count] if part else bias.detach()
    y = aligned_linear(x, w, b) if x.ndim == 2 else aligned_linear(x.flatten(0, -2), w, b).view(*x.shape[:-1], count)

    def formula(delta: Tensor) -> list[tuple[Tensor, Gradient]]:
        n = len(delta)
        delta, a = delta.reshape(n, -1, count), x.detach().reshape(n, -1, x.shape[-1])
        parts: list[tuple[Tensor, Gradient]] = []
        vectors = Vectors(delta[:, 0]) if delta.shape[1] == 1 else None
        if weight.requires_grad:
            parts.append((weight, Products(delta, a, first if of else 0, of, vectors)))
        if bias is not None and bias.requires_grad:
            of_bias = delta.sum(1) if vectors is None else delta[:, 0]
            if len(bias) > count:
                parts.append((bias, Rows(pad(of_bias, (first, len(bias) - first - count)))))
            else:
                parts.append((bias, Rows(of_bias, vectors=vectors)))
        return parts

    return tape.record(y, [x], [weight, bias], formula)
