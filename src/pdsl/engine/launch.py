"""The processes of one run: rank and size of this process, and control messages between processes.

torchrun and Slurm's srun set rank and size in the environment. A process started by hand is the only one of its run.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
from torch import distributed

from pdsl.engine.base import Engine, T
from pdsl.engine.distributed import DistributedEngine, Group, contact, gather_values
from pdsl.engine.local import LocalEngine
from pdsl.settings import EngineSettings
from pdsl.topology import Graph
from pdsl.utils.errors import PdslError

JOIN_TIMEOUT = timedelta(seconds=120)  # until all ranks have started and read `engine.timeout`
DEFAULT_PORT = "29500"  # rank 0 listens here unless MASTER_PORT is set

R = TypeVar("R")


@dataclass(frozen=True)
class Place:
    """The place of this process among the processes of its job."""

    rank: int
    size: int
    local_rank: int  # among those on this machine


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Read the place that torchrun or srun assigned; None for a process started by hand."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return Place(
            rank=int(environment["RANK"]),
            size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment.get("LOCAL_RANK", 0)),
        )
    if "SLURM_PROCID" in environment and "SLURM_NTASKS" in environment and "MASTER_ADDR" in environment:
        return Place(
            rank=int(environment["SLURM_PROCID"]),
            size=int(environment["SLURM_NTASKS"]),
            local_rank=int(environment.get("SLURM_LOCALID", 0)),
        )
    return None


class Processes(Protocol):
    """All processes of a run, seen from one of them."""

    rank: int

    def gather(self, values: Sequence[T]) -> list[T]:
        """All-gather: concatenate the values of all processes in the order of ranks."""

    def all_or_raise(self, action: Callable[[], R]) -> R:
        """Run `action` on every process. If it fails on one, raise its error on all. It must not communicate."""

    def configure(self, settings: EngineSettings) -> None:
        """Apply the settings: timeout and device."""

    def engine(self, graph: Graph) -> Engine:
        """Create the engine of this process's agents."""


class SingleProcess:
    """The only process of a run."""

    rank = 0

    def gather(self, values: Sequence[T]) -> list[T]:
        return list(values)

    def all_or_raise(self, action: Callable[[], R]) -> R:
        return action()

    def configure(self, settings: EngineSettings) -> None:
        pass

    def engine(self, graph: Graph) -> Engine:
        return LocalEngine(graph)


class ProcessGroup:
    """Several processes, joined by torch.distributed."""

    def __init__(self, here: Place):
        self.rank, self.size = here.rank, here.size
        self._local_rank = here.local_rank
        self._control: Group = None  # for plain values
        self._rows: Group = None  # for rows of agents

    def gather(self, values: Sequence[T]) -> list[T]:
        return gather_values(values, self.size, self._control)

    def all_or_raise(self, action: Callable[[], R]) -> R:
        problem: str | None = None
        try:
            result = action()
        except PdslError as e:
            problem = str(e)
        except OSError as e:
            problem = f"{e.filename}: {e.strerror}"
        for rank, error in enumerate(self.gather([problem])):
            if error is not None:
                raise PdslError(error if rank == 0 else f"rank {rank}: {error}")
        return result

    def configure(self, settings: EngineSettings) -> None:
        timeout = timedelta(seconds=settings.timeout)
        on_gpu = settings.device.startswith("cuda") and torch.cuda.is_available()  # else `prepare` refuses the device
        if on_gpu:
            torch.cuda.set_device(self._local_rank)  # the device "cuda" then means this GPU
        with contact():
            self._control = distributed.new_group(timeout=timeout, backend="gloo")
            self._rows = distributed.new_group(timeout=timeout, backend="nccl") if on_gpu else self._control

    def engine(self, graph: Graph) -> Engine:
        return DistributedEngine(graph, self.rank, self.size, self._rows, self._control)


@contextmanager
def process_group() -> Iterator[Processes]:
    """Join the processes of this run until the block ends."""
    here = place()
    if here is None:
        yield SingleProcess()
        return
    os.environ.setdefault("MASTER_PORT", DEFAULT_PORT)
    with contact():
        distributed.init_process_group("gloo", rank=here.rank, world_size=here.size, timeout=JOIN_TIMEOUT)
    yield ProcessGroup(here)
    distributed.destroy_process_group()  # not after an error: other ranks may be gone
