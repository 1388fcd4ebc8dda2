"""Several ranks of one run, as torchrun would start them, joined by real gloo."""

import json
import os
import socket
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from pdsl.config import validate
from pdsl.engine import base
from pdsl.engine.launch import Processes, SingleProcess, process_group
from pdsl.training.evaluation import final_evaluation
from pdsl.training.experiment import prepare
from pdsl.training.trainer import rounds
from tests.helpers.commands import PATIENCE, _command, forking

LONG_PATIENCE = 5 * PATIENCE  # several processes on few cores
Settings = dict[str, Any]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def outcomes(size: int, configs: list[Settings], folder: Path) -> list[Settings]:
    """Every run's rows and hash of all models, on so many ranks; none: in this process."""
    if size == 0:
        return [_outcome(SingleProcess(), values) for values in configs]
    port, told = free_port(), folder / f"{size}.json"
    processes = [forking.Process(target=_rank, args=(rank, size, port, configs, told)) for rank in range(size)]
    for process in processes:
        process.start()
    ended(processes)
    found: list[Settings] = json.loads(told.read_text())
    return found


def ended(processes: list[ForkServerProcess], code: int = 0) -> None:
    for process in processes:
        process.join(LONG_PATIENCE)
    assert [process.exitcode for process in processes] == [code] * len(processes)


def _rank(rank: int, size: int, port: int, configs: list[Settings], told: Path) -> None:
    os.environ.update(environment(rank, size, port))
    with process_group() as ranks:
        found = [_outcome(ranks, values) for values in configs]
    if rank == 0:
        told.write_text(json.dumps(found))


def _outcome(ranks: Processes, values: Settings) -> Settings:
    """`most_bytes` among the values, which is no setting: how much of what neighbours answer is held at once."""
    config = validate({name: value for name, value in values.items() if name != "most_bytes"}, "test")
    base.MAX_BYTES_IN_FLIGHT = values.get("most_bytes", 2**27)
    ranks.configure(config.engine)
    e = prepare(config, engine=ranks.engine)
    steps = list(rounds(e))
    evaluation = final_evaluation(e, steps[-1].state.x)
    held = ranks.gather([(e.engine.agents.start, e.engine.agents.stop, len(e.data.y))])
    rows = json.loads(json.dumps([step.row for step in steps]))
    return {"sha256": evaluation.models_sha256, "rows": rows, "held": held}


def launched(size: int, *args: object, said: Path) -> list[ForkServerProcess]:
    """`pdsl args…` on so many ranks; what rank r says is in said/r.out and said/r.err."""
    port, processes = free_port(), []
    for rank in range(size):
        where = (Path.cwd(), environment(rank, size, port), ["pdsl", *map(str, args)], said / f"{rank}")
        processes.append(forking.Process(target=_launched, args=where))
        processes[-1].start()
    return processes


def _launched(cwd: Path, told: dict[str, str], argv: list[str], said: Path) -> None:
    os.environ.update(told)
    _command(cwd, argv, f"{said}.out", f"{said}.err")
