"""The processes of one run: who we are among them, and what they say to each other besides the agents' messages.

torchrun and Slurm's srun start them and tell each its rank in the environment. Started by hand, a process is alone.
"""

import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import distributed

from pdsl.engine.base import Engine, T
from pdsl.engine.local import Local
from pdsl.errors import ContactError, PdslError
from pdsl.graph import Graph
from pdsl.settings import EngineSettings

JOINING = timedelta(seconds=120)  # until all are there and have read the settings, which name another timeout
PORT = "29500"  # where rank 0 listens, unless MASTER_PORT says otherwise
SHORT, DIGITS = 1024, 16  # bytes that are sent at once, and how many of them say how many there are

R = TypeVar("R")
Group = Any  # torch's own name for it is private


@dataclass(frozen=True)
class Place:
    """Our place among the processes that were started together."""

    rank: int
    size: int
    local_rank: int  # among those on this machine
    restarts: int  # how often this job was restarted
    job: str  # what it is called, before and after a restart


def place(environment: Any = os.environ) -> Place | None:
    """What torchrun or srun says about us; None for a process that was started alone."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        name = environment.get("TORCHELASTIC_RUN_ID", "none")
        return Place(
            rank=int(environment["RANK"]),
            size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment.get("LOCAL_RANK", 0)),
            restarts=int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)),
            job=_launcher() if name == "none" else f"torchrun {name}",
        )
    if "SLURM_PROCID" in environment and "SLURM_NTASKS" in environment and "MASTER_ADDR" in environment:
        return Place(
            rank=int(environment["SLURM_PROCID"]),
            size=int(environment["SLURM_NTASKS"]),
            local_rank=int(environment.get("SLURM_LOCALID", 0)),
            restarts=int(environment.get("SLURM_RESTART_COUNT", 0)),
            job=f"slurm {environment.get('SLURM_JOB_ID')}",
        )
    return None


def _launcher() -> str:
    """torchrun gives no name unless it was told one, but the process that starts us again is the same."""
    stat = Path(f"/proc/{os.getppid()}/stat")
    began = stat.read_text().rpartition(")")[2].split()[19] if stat.exists() else "?"
    return f"{socket.gethostname()} {os.getppid()} {began}"


class Processes(Protocol):
    """All processes of a run, seen from one of them."""

    rank: int
    restarts: int
    job: str

    def gather(self, values: Sequence[T]) -> list[T]:
        """What every process has to say, in the order of ranks, on all of them."""

    def together(self, action: Callable[[], R]) -> R:
        """`action` on every process; where one fails, all do, with its message. They must not talk in it."""

    def settle(self, settings: EngineSettings) -> None:
        """From now on do as the settings say."""

    def engine(self, graph: Graph) -> Engine:
        """This process's part of the agents."""


class Alone:
    """One process owns everything."""

    rank, restarts, job = 0, 0, ""

    def gather(self, values: Sequence[T]) -> list[T]:
        return list(values)

    def together(self, action: Callable[[], R]) -> R:
        return action()

    def settle(self, settings: EngineSettings) -> None:
        pass

    def engine(self, graph: Graph) -> Engine:
        return Local(graph)


class Ranks:
    """Several processes, joined by torch.distributed. Plain values travel as JSON over gloo."""

    def __init__(self, here: Place):
        self.rank, self.size, self.restarts, self.job = here.rank, here.size, here.restarts, here.job
        self._local_rank = here.local_rank
        self._group: Group = None  # for what is said here; None is the group of all that torch starts with
        self._rows: Group = None  # for agents' rows

    def gather(self, values: Sequence[T]) -> list[T]:
        with contact():
            return [value for said in self._all(json.dumps(list(values)).encode()) for value in json.loads(said)]

    def _all(self, said: bytes) -> list[bytes]:
        """Everybody's bytes. Short ones are there in one turn; it takes another where anybody's are long."""
        heads = self._turn(f"{len(said):>{DIGITS}}".encode() + said[: SHORT - DIGITS], SHORT)
        longest = max(int(head[:DIGITS]) for head in heads)
        return [head[DIGITS:] for head in heads] if longest <= SHORT - DIGITS else self._turn(said, longest)

    def _turn(self, said: bytes, size: int) -> list[bytes]:
        """`size` bytes of everybody, filled up with spaces, which change nothing that JSON says."""
        padded = torch.frombuffer(bytearray(said.ljust(size)), dtype=torch.uint8)
        everyones = [torch.empty_like(padded) for _ in range(self.size)]
        distributed.all_gather(everyones, padded, group=self._group)
        return [row.numpy().tobytes() for row in everyones]

    def together(self, action: Callable[[], R]) -> R:
        problem: str | None = None
        try:
            result = action()
        except PdslError as e:
            problem = str(e)
        except OSError as e:
            problem = f"{e.filename}: {e.strerror}"
        for rank, told in enumerate(self.gather([problem])):
            if told is not None:
                raise PdslError(told if rank == 0 else f"rank {rank}: {told}")
        return result

    def settle(self, settings: EngineSettings) -> None:
        timeout = timedelta(seconds=settings.timeout)
        on_gpu = settings.device.startswith("cuda") and torch.cuda.is_available()  # if it is not, `prepare` says so
        if on_gpu:
            torch.cuda.set_device(self._local_rank)  # "cuda" then means this one
        with contact():
            self._group = distributed.new_group(timeout=timeout, backend="gloo")
            self._rows = distributed.new_group(timeout=timeout, backend="nccl") if on_gpu else self._group

    def engine(self, graph: Graph) -> Engine:
        from pdsl.engine.torchrun import Torchrun  # which builds on this

        return Torchrun(graph, self, self._rows)


@contextmanager
def joined() -> Iterator[Processes]:
    """The processes of this run, together until the block ends."""
    here = place()
    if here is None:
        yield Alone()
        return
    os.environ.setdefault("MASTER_PORT", PORT)
    with contact():
        distributed.init_process_group("gloo", rank=here.rank, world_size=here.size, timeout=JOINING)
    yield Ranks(here)
    distributed.destroy_process_group()  # not after an error: the others may be gone


@contextmanager
def contact() -> Iterator[None]:
    """What torch says when another rank is gone or late becomes `ContactError`."""
    try:
        yield
    except RuntimeError as e:
        reason = next(iter(str(e).splitlines()), type(e).__name__)
        raise ContactError(f"lost contact with another rank: {reason}") from e
