"""All conformance checks of a run, in their order."""

from collections.abc import Sequence

from pdsl.auditing.accounts import check_counts, check_end, check_epsilon, check_ledger, check_rows
from pdsl.auditing.noise import check_every_round, check_noise
from pdsl.auditing.public import check_public_parts
from pdsl.auditing.replay import Start, replay
from pdsl.auditing.report import Finding, Verdict
from pdsl.auditing.sampling import check_keys, check_sampler
from pdsl.auditing.sensitivity import check_gradients, check_sensitivity
from pdsl.auditing.taint import check_public, check_taint
from pdsl.errors import PdslError
from pdsl.parallel import Workers
from pdsl.privacy import Ledger
from pdsl.runs import Row
from pdsl.train import Experiment, apparatus


def audit_experiment(
    e: Experiment,
    ledger: Ledger | None,
    rows: Sequence[Row],
    stated: Sequence[float | None] = (),
    starts: Sequence[Start] = (),
) -> list[Finding]:
    """Every check that needs no file. `stated` is the ε written down for each agent; `starts`: states that are kept."""
    if e.mechanisms is None or ledger is None:
        return [Finding("claim", Verdict.INCONCLUSIVE, "the run has no noise and makes no claim")]
    with Workers(e.config.engine.workers) as workers:
        parts = apparatus(e, workers)
        try:
            replayed = replay(e, parts, max(1, ledger.rounds), starts)
        except PdslError as error:
            return [Finding("only declared messages leave", Verdict.FAIL, str(error))]
        tensors = [shape.numel() for _, shape in e.network.shapes()]
        per_agent = list(stated) or ledger.epsilon_per_agent
        return [
            check_ledger(e, ledger, rows),
            check_rows(e, replayed, rows),
            check_end(e, ledger, rows),
            check_counts(e, ledger, replayed),
            check_epsilon(e, parts.noise, replayed.messages, ledger.rounds, per_agent, ledger, rows),
            *check_noise(parts.noise, replayed.messages, tensors, replayed.covered),
            check_every_round(e, parts.noise, replayed.messages, ledger.rounds),
            check_sampler(e),
            check_keys(e),
            check_gradients(e, parts.owners, replayed.rounds),
            check_sensitivity(e, parts),
            check_taint(e, parts, replayed.rounds),
            check_public(e),
            check_public_parts(e),
        ]
