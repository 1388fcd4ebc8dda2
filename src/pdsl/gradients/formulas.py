"""Per-record gradients of one parameter, from a layer's input a and the loss's derivative δ at the layer's output.

Every formula gives each record's squared norm and any weighted sum of the records' gradients. A record's gradient is
either built in float32, and norm and sum are those of the built numbers, or it is not built:

- `Products`: Σ_t δ_t a_tᵀ, of a linear layer. The squared norm is ⟨AAᵀ, BBᵀ⟩ over pairs of positions (a Gram matrix).
- `Lookups`: δ_t in row id_t, of an embedding. The δ of equal ids are added up; no row of an id that does not occur is
  built.

Norms that are not those of built numbers are computed in float64, and a bound of their rounding error is added. So a
norm is never below that of the gradient which is summed, and clipping bounds it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from pdsl.utils.inputs import Inputs

ROUNDING = 2.0**-53  # relative rounding error of a float64 operation
CACHED = 2**18  # numbers of a chunk of rows
CHUNK = 16  # records of a sequence whose products are computed in float64 together
MIN_TRANSPOSED = 64  # outputs of a layer from which on products with a transposed matrix are fast
MAX_BUILT = 2**24  # numbers of a parameter's gradients that are kept between norms and sum


@dataclass(frozen=True)
class PerRecord:
    """Per-record gradients of one or several parameters, as their norms and weighted sums."""

    squared_norms: Tensor  # [n] float64
    # factors f of the first records → Σ_r f_r g_r [size] float64; rows with factor 0 may be infinite
    weighted_sum: Callable[[Tensor], Tensor]
    # the same written to a tensor: (factors, out [size]); optional, saves memory traffic
    write: Callable[[Tensor, Tensor], object] | None = None

    @classmethod
    def writing(cls, squared_norms: Tensor, size: int, write: Callable[[Tensor, Tensor], object]) -> "PerRecord":
        """Gradients whose sum is written to a tensor."""

        def weighted_sum(factors: Tensor) -> Tensor:
            out = torch.empty(size, dtype=torch.float64, device=factors.device)
            write(factors, out)
            return out

        return cls(squared_norms, weighted_sum, write)


def norms_and_finite(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Norms [n] of vectors [n, size], and the vectors with finite numbers only; both in float64."""
    in_float64 = vectors.double()
    norms = torch.linalg.vector_norm(in_float64, dim=1)
    return norms, in_float64.nan_to_num_()


class Vectors:
    """Vectors [n, size] of the records in float64, converted once for norms and sums, and for all their uses."""

    def __init__(self, vectors: Tensor):
        self.in_float32 = vectors

    @cached_property
    def _converted(self) -> tuple[Tensor, Tensor]:
        return norms_and_finite(self.in_float32)

    @property
    def norms(self) -> Tensor:
        return self._converted[0]

    @property
    def finite(self) -> Tensor:
        """Vectors with zeros and large numbers for numbers that are not finite; such a vector's norm is not finite."""
        return self._converted[1]


class Flat(NamedTuple):
    """Inputs of the records as vectors."""

    padded: Tensor  # [n, width] with zeros up to the width of a matrix product
    vectors: Vectors


class Block:
    """Records padded for a kernel. All models that the records are used with share conversions of the inputs."""

    def __init__(self, inputs: Inputs, targets: Tensor, n: int):
        self.inputs, self.targets = inputs, targets
        self.n = n  # records without the padding

        self.flat: Flat | None = None  # set for the first model that needs it


@dataclass(frozen=True)
class Rows:
    """Gradients built as rows [n, size]. `layout` is (shape, order) if a row is the parameter's, permuted."""

    g: Tensor
    layout: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    vectors: Vectors | None = None  # the rows in float64, if another gradient uses them too

    def build(self) -> Tensor:
        """Gradients in the parameter's own order: [n, size]."""
        if self.layout is None:
            return self.g
        shape, order = self.layout
        return self.g.view(-1, *shape).permute(0, *(1 + axis for axis in order)).reshape(len(self.g), -1)

    def per_record(self) -> PerRecord:
        if self.layout is None and self.g.numel() <= CACHED:
            vectors = self.vectors or Vectors(self.g)
            return PerRecord.writing(
                vectors.norms.square(),
                self.g.shape[1],
                lambda factors, out: torch.mm(factors[None], vectors.finite[: len(factors)], out=out[None]),
            )

        def write(factors: Tensor, out: Tensor) -> None:
            if self.layout is None:
                sum_rows(_chunks(self.g), factors, out)
                return
            shape, order = self.layout
            total = torch.empty_like(out)
            sum_rows(_chunks(self.g), factors, total)
            permuted = total.view(shape).permute(order)
            out.view(permuted.shape).copy_(permuted)

        return PerRecord.writing(norms_of(self.g).square(), self.g.shape[1], write)


def norms_of(rows: Tensor) -> Tensor:
    """Norms over the last dimension, in float64."""
    return torch.cat([torch.linalg.vector_norm(chunk, dim=-1) for chunk in in_float64(_chunks(rows))])


def in_float64(chunks: Iterable[Tensor]) -> Iterator[Tensor]:
    """Chunks of rows as float64, one after the other in the same memory, which stays in the cache."""
    buffer = None
    for chunk in chunks:
        if buffer is None:
            buffer = torch.empty(chunk.shape, dtype=torch.float64, device=chunk.device)
        yield buffer[: len(chunk)].copy_(chunk)


def sum_rows(chunks: Iterable[Tensor], factors: Tensor, out: Tensor) -> None:
    """Write Σ_r f_r g_r in float64. A row with a number that is not finite has factor 0."""
    start = 0
    out.zero_()
    for rows in in_float64(chunks):
        part = factors[start : start + len(rows)]
        out.addmv_(rows.nan_to_num_()[: len(part)].T, part)
        start += len(part)


def _chunks(rows: Tensor) -> tuple[Tensor, ...]:
    return torch.split(rows, _chunk(max(1, rows[0].numel())))


def _chunk(size: int) -> int:
    """Records whose gradients of this size fit into a cache together."""
    return max(1, CACHED // size)


@dataclass(frozen=True)
class Products:
    """Gradients Σ_t δ_t a_tᵀ of a weight [out, in]. `first` and `of` place it in rows of a taller parameter."""

    delta: Tensor  # [n, T, out]
    a: Tensor  # [n, T, in]
    first: int = 0
    of: int = 0  # rows of the parameter; 0: out
    vectors: Vectors | None = None  # δ of one position in float64, if another gradient uses it too

    def build(self) -> Tensor:
        """Gradients [n, size]."""
        g = torch.bmm(self.delta.transpose(1, 2), self.a)
        if self.of:
            g = torch.nn.functional.pad(g, (0, 0, self.first, self.of - self.first - g.shape[1]))
        return g.flatten(1)

    def per_record(self) -> PerRecord:
        n, T, out = self.delta.shape
        columns = self.a.shape[2]
        size, width = out * columns, out + columns
        # measured costs per record, in products of float32 numbers
        built, unbuilt = size * (T + 55), 2 * T * (size + T * width) + 200 * T * width
        if T > 1 and built < unbuilt:
            return Rows(self.build()).per_record() if n * size <= MAX_BUILT else self._rebuilt()
        return self._unbuilt()

    def _rebuilt(self) -> PerRecord:
        """Gradients that are built twice, a few records at a time: once for the norms and once for the sum."""

        def chunks() -> Iterator[Tensor]:
            size = _chunk(self.delta.shape[2] * self.a.shape[2])
            for delta, a in zip(torch.split(self.delta, size), torch.split(self.a, size), strict=True):
                yield replace(self, delta=delta, a=a).build()

        norms = torch.cat([torch.linalg.vector_norm(chunk, dim=1) for chunk in in_float64(chunks())])
        size = max(self.of, self.delta.shape[2]) * self.a.shape[2]
        return PerRecord.writing(norms.square(), size, lambda factors, out: sum_rows(chunks(), factors, out))

    def _unbuilt(self) -> PerRecord:
        _, T, out = self.delta.shape
        columns = self.a.shape[2]
        if T == 1:
            return self._outer()
        sizes = norms_of(self.delta) * norms_of(self.a)  # [n, T]
        parts = zip(torch.split(self.delta, CHUNK), torch.split(self.a, CHUNK), strict=True)
        gram = torch.cat([_gram(delta.double()).mul_(_gram(a.double())).sum((1, 2)) for delta, a in parts])
        norms = gram + _slack(T, out + columns) * sizes.sum(1).square()

        def weighted_sum(factors: Tensor) -> Tensor:
            n, total = len(factors), torch.zeros(out, columns, dtype=torch.float64, device=factors.device)
            tensors = [self.delta[:n], self.a[:n], factors[:, None, None]]
            for delta, a, f in zip(*(torch.split(t, CHUNK) for t in tensors), strict=True):
                scaled = delta.double().nan_to_num_().mul_(f)
                total.addmm_(scaled.view(-1, out).T, a.double().nan_to_num_().view(-1, columns))
            return self._place(total)

        return PerRecord(norms, weighted_sum)

    def _outer(self) -> PerRecord:
        """Gradients δ aᵀ of one position: the norm is a product of norms, the sum a matrix product."""
        of_delta, of_a = self.vectors or Vectors(self.delta[:, 0]), Vectors(self.a[:, 0])
        norms, delta, a = of_delta.norms * of_a.norms, of_delta.finite, of_a.finite

        def scaled(factors: Tensor) -> Tensor:
            rows = (delta[: len(factors)] * factors[:, None]).T
            return rows.contiguous() if len(rows) < MIN_TRANSPOSED else rows

        if self.of:
            return PerRecord(norms.square(), lambda factors: self._place(scaled(factors) @ a[: len(factors)]))

        def write(factors: Tensor, out: Tensor) -> None:
            torch.mm(scaled(factors), a[: len(factors)], out=out.view(delta.shape[1], a.shape[1]))

        return PerRecord.writing(norms.square(), delta.shape[1] * a.shape[1], write)

    def _place(self, total: Tensor) -> Tensor:
        """The sum in its rows of the parameter, flat."""
        if self.of:
            total = torch.nn.functional.pad(total, (0, 0, self.first, self.of - self.first - len(total)))
        return total.reshape(-1)


def _gram(t: Tensor) -> Tensor:
    return torch.bmm(t, t.transpose(1, 2))


@dataclass(frozen=True)
class Lookups:
    """Gradients of an embedding's weight [vocabulary, dim]: δ_t is added to row id_t."""

    ids: Tensor  # [n, T]
    delta: Tensor  # [n, T, dim]
    vocabulary: int

    def build(self) -> Tensor:
        """Gradients [n, size]."""
        n, _, dim = self.delta.shape
        rows = self.delta.new_zeros(n, self.vocabulary, dim)
        return rows.scatter_add_(1, self.ids[..., None].expand_as(self.delta), self.delta).flatten(1)

    def per_record(self) -> PerRecord:
        n, T, dim = self.delta.shape
        delta = self.delta.double()
        if T == 1:
            norms = delta.square().sum((1, 2))
        else:  # add up equal ids of a record first
            record = torch.arange(n, device=self.ids.device)[:, None]
            keys, place = torch.unique(self.ids + self.vocabulary * record, return_inverse=True)
            rows = delta.new_zeros(len(keys), dim).index_add_(0, place.view(-1), delta.view(-1, dim))
            squares = rows.square().sum(1)
            norms = squares.new_zeros(n).index_add_(0, keys // self.vocabulary, squares)

        delta.nan_to_num_()

        def write(factors: Tensor, out: Tensor) -> None:
            n = len(factors)
            scaled = delta[:n] * factors[:, None, None]
            out.zero_().view(-1, dim).index_add_(0, self.ids[:n].reshape(-1), scaled.view(-1, dim))

        return PerRecord.writing(norms, self.vocabulary * dim, write)


Gradient = Rows | Products | Lookups


def combine(gradients: Sequence[Gradient], n: int, size: int, device: torch.device) -> PerRecord:
    """Per-record gradients of one parameter that is used once, several times, or never."""
    if not gradients:
        zero = torch.zeros(n, dtype=torch.float64, device=device)
        return PerRecord(zero, lambda factors: zero.new_zeros(size))
    if len(gradients) == 1:
        return gradients[0].per_record()
    products = [g for g in gradients if isinstance(g, Products)]
    if len(products) == len(gradients):
        slices = sorted({(g.first, g.first + g.delta.shape[2]) for g in products})
        if all(end <= start for (_, end), (start, _) in pairwise(slices)):
            of_slice = [_join([g for g in products if g.first == first]) for first, _ in slices]
            return _add([g.per_record() for g in of_slice])
    lookups = [g for g in gradients if isinstance(g, Lookups)]
    if len(lookups) == len(gradients):
        ids, delta = torch.cat([g.ids for g in lookups], dim=1), torch.cat([g.delta for g in lookups], dim=1)
        return replace(lookups[0], ids=ids, delta=delta).per_record()
    built = gradients[0].build().clone()
    for g in gradients[1:]:
        built += g.build()
    return Rows(built).per_record()


def _join(products: Sequence[Products]) -> Products:
    """Several uses of the same weight as one use with more positions."""
    if len(products) == 1:
        return products[0]
    delta, a = (torch.cat(parts, dim=1) for parts in zip(*((g.delta, g.a) for g in products), strict=True))
    return replace(products[0], delta=delta, a=a, vectors=None)


def _add(parts: Sequence[PerRecord]) -> PerRecord:
    """Gradients of different rows of one parameter."""
    norms = torch.stack([part.squared_norms for part in parts]).sum(0)

    def weighted_sum(factors: Tensor) -> Tensor:
        return torch.stack([part.weighted_sum(factors) for part in parts]).sum(0)

    return PerRecord(norms, weighted_sum)


def _slack(positions: int, width: int) -> float:
    """Bound of the error of a squared norm from Gram matrices, relative to (Σ_t ‖δ_t‖‖a_t‖)²."""
    return (positions**2 + 2 * width + 16) * ROUNDING
