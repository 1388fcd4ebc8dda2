"""Check that everything public is the same for other private records: the run is prepared again with them."""

import math
from dataclasses import replace

import torch

from pdsl.auditing.report import Finding, Verdict, conclude
from pdsl.errors import PdslError
from pdsl.train import Experiment, first_models, prepare


def check_public_parts(e: Experiment) -> Finding:
    """First model, graph, public set, test set, rate and noise do not depend on the agents' records.

    The run is prepared with the negated records, and with one record fewer; in a simulation the latter may change the
    rate, which then is no secret.
    """
    check = "public parts"
    if len(e.engine.agents) != e.graph.agents:
        return Finding(check, Verdict.PASS, "not checked: other processes hold records")
    model = None if e.config.model.name != "python" else e.network.module
    key = getattr(e.streams, "key", None)
    private = e.data.published is None and e.streams.secret
    last = torch.arange(len(e.data.y)) < len(e.data.y) - 1
    owner = e.data.owner
    fewer = replace(e.data, x=e.data.x[last], y=e.data.y[last], owner=None if owner is None else owner[last])
    others = {"the negated records": replace(e.data, x=-e.data.x)}
    if private or e.data.published is not None:
        others["a record fewer"] = fewer
    problems = []
    for name, data in others.items():
        try:
            other = prepare(e.config, model=model, data=data, graph=e.graph, key=key)
        except PdslError as error:
            problems.append(f"with {name} the run is refused: {error}")
            continue
        problems += [f"{part} changes with {name}" for part in _differences(e, other)]
    return conclude(check, problems, f"the same with {' and with '.join(others)}")


def _differences(e: Experiment, other: Experiment) -> list[str]:
    same = {
        "the first model": torch.equal(first_models(e), first_models(other)),
        "the public set": all(torch.equal(a, b) for a, b in zip(e.validation, other.validation, strict=True)),
        "the test set": all(torch.equal(a, b) for a, b in zip(e.test, other.test, strict=True)),
        "the sampling rate": e.batches.rate == other.batches.rate,
        "the noise": all(
            math.isclose(a.sigma, b.sigma, rel_tol=1e-3)
            for a, b in zip(e.mechanisms or (), other.mechanisms or (), strict=True)
        )
        or e.config.batch.sampler == "fixed",
    }
    return [name for name, alike in same.items() if not alike]
