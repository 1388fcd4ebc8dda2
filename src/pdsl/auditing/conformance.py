"""All conformance checks of a run, in their order."""

from collections.abc import Callable, Sequence

from pdsl.auditing.accounts import check_counts, check_end, check_epsilon, check_ledger, check_rows
from pdsl.auditing.noise import check_every_round, check_noise
from pdsl.auditing.public import check_public_parts
from pdsl.auditing.replay import Start, replay
from pdsl.auditing.report import Finding, Verdict
from pdsl.auditing.sampling import check_keys, check_sampler
from pdsl.auditing.sensitivity import check_gradients, check_sensitivity
from pdsl.auditing.taint import check_public, check_taint
from pdsl.parallel import Workers
from pdsl.privacy import Ledger
from pdsl.runs import Row
from pdsl.train import Experiment, apparatus

Check = Callable[[], Finding | list[Finding]]


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
        except Exception as error:  # a user's algorithm may fail in any way
            return [Finding("rounds run again", Verdict.FAIL, f"a round cannot be run again: {error}")]
        tensors = [shape.numel() for _, shape in e.network.shapes()]
        per_agent = list(stated) or ledger.epsilon_per_agent
        noise, messages = parts.noise, replayed.messages
        checks: dict[str, Check] = {
            "ledger": lambda: check_ledger(e, ledger, noise, rows),
            "rounds run again": lambda: check_rows(e, replayed, rows),
            "end of the run": lambda: check_end(e, ledger, rows),
            "messages counted": lambda: check_counts(e, ledger, replayed),
            "ε computed again": lambda: check_epsilon(e, noise, messages, ledger.rounds, per_agent, ledger, rows),
            "noise": lambda: list(check_noise(noise, messages, tensors, replayed.covered)),
            "noise of every round": lambda: check_every_round(e, noise, messages, ledger.rounds),
            "sampler": lambda: check_sampler(e),
            "noise and batches depend on the key": lambda: check_keys(e),
            "clipped gradients": lambda: check_gradients(e, parts.owners, replayed.rounds),
            "sensitivity": lambda: check_sensitivity(e, parts),
            "only noisy messages are used": lambda: check_taint(e, parts, replayed.rounds),
            "public records": lambda: check_public(e),
            "public parts": lambda: check_public_parts(e),
        }
        return [finding for name, check in checks.items() for finding in _made(name, check)]


def _made(name: str, check: Check) -> list[Finding]:
    """The findings of a check; inconclusive if it breaks."""
    try:
        found = check()
    except Exception as error:  # the code under audit may be broken in any way
        return [Finding(name, Verdict.INCONCLUSIVE, f"the check could not be made: {type(error).__name__}: {error}")]
    return found if isinstance(found, list) else [found]
