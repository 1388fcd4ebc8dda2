"""Slow reference implementations of gradients, noise and batches that share no code with the implementation audited.

Gradients are computed one record at a time, clipped and summed in float64. Noise is drawn bit by bit from the
definition of the sampler, and batches from the definition of Poisson sampling.
"""

import decimal
import math
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache, partial
from hashlib import blake2b

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import one_hot

from pdsl.models.network import Network, main_output
from pdsl.tasks import Task
from pdsl.utils.inputs import Inputs, call, split
from pdsl.utils.random import SecretStreams, Streams


def clipped_sum(network: Network, x: Tensor, inputs: Inputs, targets: Tensor, C: float) -> Tensor:
    """Σ_r g_r / max(1, ‖g_r‖/C) over records, one at a time; a record with a non-finite gradient counts as zero."""
    total = torch.zeros(network.num_parameters, dtype=torch.float64, device=x.device)
    module = network.to_module(x).to(x.device)
    for n in range(len(targets)):
        g = _gradient(module, network.task, inputs[n : n + 1], targets[n : n + 1])
        norm = float(g.norm())
        if math.isfinite(norm):
            total += g / max(1.0, norm / C)
    return total


def gradient(network: Network, x: Tensor, inputs: Inputs, targets: Tensor) -> Tensor:
    """Gradient of the sum of losses by plain backpropagation: [d] float64."""
    return _gradient(network.to_module(x).to(x.device), network.task, inputs, targets)


def _gradient(module: nn.Module, task: Task, inputs: Inputs, targets: Tensor) -> Tensor:
    loss = task.losses(main_output(call(module, inputs)), targets).sum()
    trained = [p for p in module.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, trained, materialize_grads=True)
    return torch.cat([p.reshape(-1) for p in found]).double()


def distillation_targets(network: Network, teacher: Tensor, inputs: Inputs, labels: Tensor) -> Tensor:
    """Targets that add the distance to a teacher's output, computed one record at a time."""
    module = network.to_module(teacher).to(teacher.device)
    with torch.no_grad():
        outputs = torch.cat([main_output(call(module, record)) for record in split(inputs, 1)])
    return outputs.softmax(-1) + one_hot(labels, outputs.shape[-1])


def random_words(streams: Streams, purpose: str, agent: int, round: int, peer: int, n: int) -> NDArray[np.uint64]:
    """First n words of a stream, from its definition: a BLAKE2b key, then Philox or ChaCha20."""
    key = stream_key(streams, purpose, agent, round, peer)
    if isinstance(streams, SecretStreams):
        cipher = Cipher(ChaCha20(key, nonce=bytes(16)), mode=None).encryptor()
        return np.frombuffer(cipher.update(bytes(8 * n)), dtype="<u8")
    return np.random.Philox(key=np.frombuffer(key, dtype=np.uint64)).random_raw(n)


def stream_key(streams: Streams, purpose: str, agent: int, round: int, peer: int) -> bytes:
    named = f"{purpose}/{round}/{peer}".encode()
    if isinstance(streams, SecretStreams):
        bound = blake2b(streams.context, key=streams.key, digest_size=32).digest()
        of_agent = blake2b(f"{agent}".encode(), key=bound, digest_size=32).digest()
        return blake2b(named, key=of_agent, digest_size=32).digest()
    of_agent = blake2b(f"{streams.seed}/{agent}".encode(), digest_size=32).digest()
    return blake2b(named, key=of_agent, digest_size=16).digest()


def extension(streams: Streams, purpose: str, agent: int, round: int, peer: int, index: int) -> int:
    """The 512 further random bits of one value."""
    key = stream_key(streams, purpose, agent, round, peer)
    if not isinstance(streams, SecretStreams):
        of_agent = blake2b(f"{streams.seed}/{agent}".encode(), digest_size=32).digest()
        key = blake2b(f"{purpose}/bits/{round}/{peer}".encode(), key=of_agent, digest_size=32).digest()
    return int.from_bytes(blake2b(f"extension/{index}".encode(), key=key).digest(), "big")


def batch(streams: Streams, n: int, rate: float, agent: int, round: int, step: int) -> NDArray[np.int64]:
    """Positions of the records in a Poisson batch: their uniform number is below the rate."""
    purpose = "batch" if step == 0 else f"batch.{step}.0"
    words = random_words(streams, purpose, agent, round, -1, n)
    return np.flatnonzero([(int(word) >> 11) * 2.0**-53 < rate for word in words])


def lattice_noise(
    d: int, sigma: float, streams: Streams, purpose: str, maker: int, round: int, peer: int
) -> tuple[NDArray[np.float64], int]:
    """Noise of a message of d numbers in lattice steps, and the exponent of a step."""
    exponent = math.floor(math.log2(sigma)) - 32
    k = math.ceil(Fraction(sigma) / Fraction(2) ** exponent / 256)
    start, position = 0, 0
    found: list[NDArray[np.float64]] = []
    missing = d
    words = random_words(streams, purpose, maker, round, peer, 3 * (d + d // 16 + 200))
    while missing > 0:
        count = min(32768, missing + missing // 64 + 32)
        count += count % 2
        block = words[position : position + 3 * count // 2]
        halves = np.stack([block & np.uint64(2**32 - 1), block >> np.uint64(32)], axis=1).reshape(3, count)
        values = _values(halves, k, partial(extension, streams, purpose, maker, round, peer), start)
        found.append(values[:missing])
        missing -= len(found[-1])
        start, position = start + count, position + 3 * count // 2
    return np.concatenate(found), exponent


def _values(halves: NDArray[np.uint64], k: int, further: Callable[[int], int], start: int) -> NDArray[np.float64]:
    """Accepted values of a block of candidates: in floating point if that is certain, otherwise one by one."""
    thresholds, alias = alias_table()
    top = np.array([t >> 224 for t in thresholds], dtype=np.int64)
    cell, fraction = (halves[0] >> np.uint64(20)).astype(np.int64), (halves[0] & np.uint64(2**20 - 1)).astype(np.int64)
    high = np.where(fraction < top[cell], cell, np.array(alias)[cell]).astype(np.float64)
    product = halves[1] * np.uint64(k)
    low = (product >> np.uint64(32)).astype(np.float64)
    t = low / k * (2 * high + low / k) / 131072
    u = (halves[2] & np.uint64(2**31 - 1)).astype(np.float64) / 2**31
    kept = ((product & np.uint64(2**32 - 1)) >= np.uint64(2**32 % k)) & (u < np.exp(-t))
    negative = (halves[2] >> np.uint64(31)).astype(bool)
    z = np.where(negative, -1.0, 1.0) * (k * high + low)
    uncertain = (np.abs(u - np.exp(-t)) < 2.0**-29) | (fraction == top[cell]) | (z == 0)
    for n in np.flatnonzero(uncertain):
        value = _value(int(halves[0, n]), int(halves[1, n]), int(halves[2, n]), k, further(start + int(n)))
        kept[n] = value is not None
        z[n] = value or 0
    accepted: NDArray[np.float64] = z[kept]
    return accepted


def _value(first: int, second: int, third: int, k: int, extension: int) -> int | None:
    """Value of one candidate; None if it is rejected."""
    thresholds, alias = alias_table()
    cell, fraction = first >> 20, first & (2**20 - 1)
    if fraction == thresholds[cell] >> 224:
        high = cell if (fraction << 224 | extension >> 288) < thresholds[cell] else alias[cell]
    else:
        high = cell if fraction < thresholds[cell] >> 224 else alias[cell]
    low, remainder = divmod(second * k, 2**32)
    if remainder < 2**32 % k:
        return None
    t = Fraction(low * (2 * k * high + low), 131072 * k * k)
    u = third & (2**31 - 1)
    if not Fraction(u + 1, 2**31) <= 1 - t:
        if Fraction(u, 2**31) >= 1 - t + t * t / 2:
            return None
        drawn = (u << 256) | (extension & (2**256 - 1))
        with decimal.localcontext() as context:
            context.prec = 110
            accept = (-decimal.Decimal(t.numerator) / decimal.Decimal(t.denominator)).exp()
            if decimal.Decimal(drawn) >= accept * 2**287:
                return None
    magnitude, negative = k * high + low, bool(third >> 31)
    if magnitude == 0 and negative:
        return None
    return -magnitude if negative else magnitude


@lru_cache(maxsize=1)
def alias_table() -> tuple[list[int], list[int]]:
    """Thresholds out of 2^244 and aliases for exp(−h²/(2·256²)), h < 4096, with each weight computed separately."""
    with decimal.localcontext() as context:
        context.prec = 140
        weights = [int((decimal.Decimal(-h * h) / 131072).exp() * 2**400) for h in range(4096)]
    total, cell = sum(weights), 2**244
    mass = [weight * 4096 * cell // total for weight in weights]
    mass[0] += 4096 * cell - sum(mass)
    thresholds, alias = [cell] * 4096, list(range(4096))
    small, large = [h for h in range(4096) if mass[h] < cell], [h for h in range(4096) if mass[h] >= cell]
    while small:
        light = small.pop()
        heavy = large[-1]
        thresholds[light], alias[light] = mass[light], heavy
        mass[heavy] += mass[light] - cell
        if mass[heavy] < cell:
            small.append(large.pop())
    return thresholds, alias
