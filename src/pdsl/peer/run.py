"""The rounds of one organisation: who is there, charge, one step, row, checkpoint; and what is left at the end.

The folder's `run/` is a run directory like any other (see `runs`), with its ledger (see `account`), one secret key and
log per incarnation, `events.jsonl` (refusals, who went and came) and `status.json`.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pdsl.checkpoints import Checkpoint
from pdsl.errors import PdslError
from pdsl.parallel import Workers
from pdsl.peer.account import Account
from pdsl.peer.engine import Peer, longest_honest
from pdsl.peer.events import Events
from pdsl.peer.identity import Identity
from pdsl.peer.join import BEGUN, RUN, begun, begun_under, joined, write_begun
from pdsl.peer.outcome import finish
from pdsl.peer.overheard import Overheard
from pdsl.peer.plan import Plan
from pdsl.peer.roll import AloneError
from pdsl.peer.secrets import Incarnation, check_account, incarnate
from pdsl.peer.sent import ConflictError, LoggedNoise
from pdsl.peer.status import Reporter
from pdsl.peer.task import agreed_mechanisms, check_folder, experiment, network
from pdsl.peer.transport import Loop, Transport
from pdsl.privacy.metering import Declared
from pdsl.runs import Row, RunDirectory
from pdsl.settings import EngineSettings
from pdsl.train import (
    Apparatus,
    advanced,
    apparatus,
    check_device,
    evaluate,
    finite,
    first_state,
    state_at,
    state_from,
    state_tensors,
)

LEDGER = "ledger.json"
Watch = Callable[[Row], None]


def run(
    own: Identity,
    loop: Loop,
    listen: str | None = None,
    watch: Watch = lambda row: None,
    engine: EngineSettings = EngineSettings(),  # noqa: B008  frozen
    overheard: Overheard | None = None,
) -> dict[str, Any]:
    """Train as this organisation until the plan's rounds are over. Returns the summary.

    Interrupted at any moment, by whatever means, the same call goes on where it was. What it computes with is its own
    business: `engine` is no part of the plan. What is `overheard` while it runs goes into its events.
    """
    plan = joined(own)
    plan = replace(plan, config=plan.config.model_copy(update={"engine": engine}))
    check_device(engine.device)  # a mistake leaves nothing behind
    check_folder(own, plan)
    try:
        directory = _opened(own, plan)
        with directory.lock():
            this = _Run(own, plan, loop, directory)
            if overheard is not None:
                overheard.events = this.events
            return this.to_the_end(listen, watch)
    except OSError as e:
        raise PdslError(
            f"cannot write to {own.folder}: {e.strerror}; make room or mend it, then pdsl peer run {own.folder}"
        ) from e


def _opened(own: Identity, plan: Plan) -> RunDirectory:
    path = own.folder / RUN
    if begun_under(own, plan) is not None and not (path / LEDGER).exists():
        raise PdslError(
            f"{path / LEDGER} is missing, but {own.folder / BEGUN} says that this plan was begun: what was spent is not"
            " known; restore it from a copy"
        )
    if (path / LEDGER).exists():
        return RunDirectory(path)  # whatever else is lost
    if (path / "config.toml").exists():
        return RunDirectory.open(path)
    return RunDirectory.create(path, plan.config.to_toml(), {})


@dataclass
class Progress:
    """Where a run stands; replaced as a whole when a round is over."""

    t: int  # the next round
    state: Any  # None: nothing to start from yet
    rows: list[Row]
    account: Account


class _Run:
    """One process of one organisation."""

    def __init__(self, own: Identity, plan: Plan, loop: Loop, directory: RunDirectory):
        self.own, self.plan, self.directory = own, plan, directory
        self.me = plan.agent(own.card.name)
        self.names = [card.name for card in plan.members]
        self.events = Events(directory.path / "events.jsonl")
        net = network(plan.config, plan.task)
        self.transport = Transport(loop, own, plan, self.events, net.d)
        account = self._account()
        self.incarnation: Incarnation = incarnate(directory.path, account, self.events)
        key = self.incarnation.key
        number = self.incarnation.number
        self.e = experiment(own, plan, net, key, number, account.mechanism, lambda graph: Peer(graph, self.transport))
        assert isinstance(self.e.engine, Peer)
        self.engine: Peer = self.e.engine
        privacy, batch = plan.config.privacy, plan.config.batch.size
        stretch = self.e.stretch
        for j in plan.graph.neighbourhood(self.me).tolist():
            sigma = self.e.sigma[j] * stretch[j].get(self.me, 1.0)
            self.engine.longest[j] = longest_honest(privacy, batch, sigma, net.d)
        self.progress = self._progress(account)
        self.stopped: str | None = None  # why, if before the last round
        self.began = time.monotonic()

    def _account(self) -> Account:
        privacy, path = self.plan.config.privacy, self.directory.path
        assert privacy.budget is not None  # a plan has one
        released = agreed_mechanisms(self.plan)[self.me]
        config = self.plan.config
        members = tuple(self.plan.graph.neighbourhood(self.me).tolist())
        new = Account(
            privacy.delta,
            privacy.budget,
            released,
            config.algorithm,
            config.rounds,
            self.me,
            members,
            {},
            self.plan.hash,
        )
        stored = self.directory.read(LEDGER)
        if stored is not None and _untouched(stored):
            stored = None  # an earlier start came to nothing, maybe under another plan
        elif stored is None and any(any(path.glob(trace)) for trace in ("secret-*.key", "sent-*.log", "checkpoint/*")):
            raise PdslError(f"{path / LEDGER} is missing, so what was spent is not known; restore it from a copy")
        account = new if stored is None else new.read(stored, str(path / LEDGER))
        check_account(path, account, self.directory.rows())
        if (before := begun(self.own)) is not None and before.round > account.rounds:
            raise PdslError(
                f"{path / LEDGER} is an older one: {self.own.folder / BEGUN} says that round {before.round} was charged"
                " too; restore the newest"
            )
        if account.charges:
            write_begun(self.own, self.plan, account.rounds)
        if stored is None:
            self.directory.write(LEDGER, new.to_json(self.names).encode())
        return account

    def _progress(self, account: Account) -> Progress:
        """What is left of earlier processes: the newest whole checkpoint, and a row for each round up to it."""
        checkpoint, complaints = self.directory.newest()
        for complaint in complaints:
            self.events.log("damaged", what=complaint)
        last = account.rounds if checkpoint is None else checkpoint.round
        rows = self.directory.rows()[:last]
        rows += [_absent(t) for t in range(len(rows) + 1, last + 1)]
        self.directory.write("rows.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        if checkpoint is not None:
            return Progress(last + 1, state_from(self.plan.config, checkpoint.tensors), rows, account)
        return Progress(last + 1, None if last else first_state(self.e), rows, account)

    def to_the_end(self, listen: str | None, watch: Watch) -> dict[str, Any]:
        self._describe()
        rounds = self.plan.config.rounds
        if self.progress.t > rounds:
            return self._finish()
        self.transport.start(listen)
        reporter = Reporter(self.directory, self.plan, self.me, self.transport, self.events)
        try:
            if self.progress.state is not None:
                self.transport.offer(self.progress.state.x[0])
            with Workers(self.plan.config.engine.workers) as workers:
                parts = apparatus(self.e, workers)
                logged = LoggedNoise(
                    self.e.sigma, self.e.streams, workers, self.incarnation.log, stretch=self.e.stretch
                )
                parts = replace(parts, noise=logged)
                while self.progress.t <= rounds and (row := self._round(parts, workers)) is not None:
                    reporter.row = row
                    watch(row)
            self.transport.farewell()
            return self._finish()
        finally:
            reporter.stop()
            self.transport.stop()
            self.incarnation.log.close()

    def _round(self, parts: Apparatus, workers: Workers) -> Row | None:
        """One round, or the way to the round where the others are; None where there can be no other."""
        p = self.progress
        start = time.monotonic()
        try:
            present, jump = self.transport.roll_call(p.t)
        except AloneError as e:
            if not p.rows:
                raise
            self.stopped = f"{e}"
            return None
        if jump is not None:
            return self._missed(jump, "the others were ahead")
        if p.state is None:
            p.state = self._neighbour_average()
        mark = self.incarnation.log.begin(p.t)
        account = p.account.charged(p.t, self.incarnation.number, present, mark)
        if not account.within_budget:
            self.stopped = f"round {p.t} would pass the budget of ε = {account.budget:g}"
            return None
        self.engine.begin(p.t, present)
        p.account = account
        self.directory.write(LEDGER, account.to_json(self.names).encode())
        write_begun(self.own, self.plan, p.t)
        waited = time.monotonic() - start
        try:
            charged = account.of(present)
            declared = {self.me: Declared(charged.messages, charged.steps)}
            state, facts = advanced(self.plan.config, p.state, parts.round(p.t, declared=declared))
        except ConflictError as e:
            self.events.log("conflict", round=p.t, why=str(e))
            self.transport.leave_round()
            return self._missed(p.t + 1, "its noise was used already")
        if not torch.isfinite(state.x).all():
            raise PdslError(f"diverged in round {p.t}: the model has infinite or undefined parameters")
        row = self._row(p.t, state.x, account, workers)
        row |= {"seconds": round(time.monotonic() - start, 4), "waited": round(waited + self.engine.waited, 4)}
        row |= self._whole(facts)
        for j in self.engine.shortened:
            self.events.log("shortened", round=p.t, who=self.names[j])
        self._keep(p.t, state, row)
        return row

    def _keep(self, t: int, state: Any, row: Row) -> None:
        """The round is over: on disk first, then in memory."""
        p = self.progress
        self.directory.append(row)
        self.directory.save(Checkpoint(t, state_tensors(state), time.monotonic() - self.began))
        self.directory.prune()
        self.transport.offer(state.x[0])
        self.progress = Progress(t + 1, state, [*p.rows, row], p.account)

    def _missed(self, following: int, why: str) -> Row:
        """Go to a later round: those before it are run without us."""
        p = self.progress
        self.events.log("missed", first=p.t, last=following - 1, why=why)
        absent = [_absent(t) for t in range(p.t, following)]
        for row in absent:
            self.directory.append(row)
        self.progress = replace(p, t=following, rows=[*p.rows, *absent])
        return absent[-1]

    def _neighbour_average(self) -> Any:
        """For one whose checkpoints are lost: the mean of the neighbours' models, and nothing else."""
        models = self.transport.models()
        if not models:
            raise PdslError(
                f"no checkpoint in {self.directory.path} is whole, and no neighbour gave its model; run again later"
            )
        self.events.log("restarted", why="no whole checkpoint: the mean of the neighbours' models", models=len(models))
        x = torch.stack(models).mean(0, keepdim=True)
        return state_at(self.plan.config, x.to(self.plan.config.engine.device))

    def _row(self, t: int, x: Tensor, account: Account, workers: Workers) -> Row:
        engine = self.engine
        row: Row = {"round": t, "messages": engine.messages, "bytes": engine.bytes}
        engine.messages = engine.bytes = engine.across = 0
        row["present"] = [self.names[j] for j in engine.sender.tolist() if j != self.me]
        if engine.shortened:
            row["shortened"] = [self.names[j] for j in engine.shortened]
        if engine.lost:  # the other end may not agree: W may not be doubly stochastic here
            row["lost"] = {self.names[j]: phase for j, phase in engine.lost.items()}
        if t % self.plan.config.evaluate_every == 0:
            row["epsilon"] = finite(account.epsilon)
            row |= evaluate(self.e, x, engine.mean(x), workers).as_row()
        return row

    def _whole(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Shapley values for all of the neighbourhood: who was not there was worth nothing."""
        shapley = facts.get("shapley")
        if shapley is None:
            return facts
        everyone = [self.me, *self.plan.neighbours(self.me)]
        there = self.engine.sender.tolist()
        full = {
            name: [dict(zip(there, shapley[name], strict=True)).get(j, 0.0) for j in sorted(everyone)]
            for name in ("phi", "share")
        }
        return {**facts, "shapley": {**shapley, **full}}

    def _describe(self) -> None:
        facts = self.e.facts()
        facts["edges"] = [edge for edge in facts["edges"] if edge[0] == self.me]
        facts |= {"name": self.own.card.name, "agent": self.me, "names": self.names, "plan": self.plan.hash}
        self.directory.describe(self.plan.config.to_toml(), facts, self.e.owner_facts())

    def _finish(self) -> dict[str, Any]:
        p = self.progress
        if p.state is None and p.account.charges:
            raise PdslError(f"no checkpoint in {self.directory.path} is whole, and the plan's rounds are over")
        if p.state is None or not p.rows:
            raise PdslError("not one round was run: the budget or the neighbours did not allow it")
        facts = {
            "name": self.own.card.name,
            "agent": self.me,
            "plan": self.plan.hash,
            "incarnation": self.incarnation.number,
            "stopped": self.stopped,
            "refused": self.events.counts["refused"],
            "seconds": round(time.monotonic() - self.began, 3),
        }
        return finish(self.directory, self.e, p.state.x, p.rows, p.account, facts)


def _absent(t: int) -> Row:
    return {"round": t, "absent": True, "messages": 0, "bytes": 0}


def _untouched(ledger: bytes) -> bool:
    """Is it a ledger with nothing in it?"""
    try:
        return not json.loads(ledger)["charges"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
