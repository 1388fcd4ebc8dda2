"""Round loop of one organisation: roll call, charge, training step, row and checkpoint; then its model and summary.

The folder's `run/` is a run directory (see `runs`) with a `PeerLedger`, a secret key and a noise log per generation,
`events.jsonl` and `status.json`.
"""

import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from pdsl.peer.attendance import QuorumError
from pdsl.peer.engine import PeerEngine, max_honest_norm
from pdsl.peer.experiment import build_experiment, build_network, load_data
from pdsl.peer.identity import DATA, Identity
from pdsl.peer.ledger import PeerLedger
from pdsl.peer.ledger_file import load_ledger, open_directory
from pdsl.peer.membership import load_chain, pin_stage, write_charge_marker
from pdsl.peer.noise_log import ConflictError, Generations
from pdsl.peer.progress import Progress, absent_row, continue_progress, find_next_round, load_progress
from pdsl.peer.receipts import check_copy
from pdsl.peer.records_check import check_records
from pdsl.peer.row_layout import find_members, spread_values
from pdsl.peer.stages import StagePlan
from pdsl.peer.statement import keep_sums, write_statement
from pdsl.peer.status import Events, OnLine, Status, StatusWriter
from pdsl.peer.trainers import Trainers
from pdsl.peer.transport import Loop, Transport
from pdsl.privacy import Release
from pdsl.privacy.statement import statement
from pdsl.report import write_report
from pdsl.runs.checkpoints import Checkpoint
from pdsl.runs.directory import FEATURES, LEDGER, RunDirectory
from pdsl.runs.model_file import pack_model
from pdsl.settings import EngineSettings
from pdsl.training.baselines import compute_baselines, describe_gain
from pdsl.training.evaluation import evaluate, final_evaluation, finite
from pdsl.training.experiment import check_device
from pdsl.training.records import RoundRecord
from pdsl.training.trainer import (
    State,
    make_state,
    run_round,
    state_tensors,
)
from pdsl.utils.errors import PdslError
from pdsl.utils.types import JsonDict
from pdsl.utils.workers import Workers

OnRound = Callable[[RoundRecord], None]


def run(
    own: Identity,
    loop: Loop,
    listen: str | None = None,
    on_round: OnRound = lambda row: None,
    engine: EngineSettings = EngineSettings(),  # noqa: B008  frozen
    on_event: OnLine = lambda line: None,
) -> JsonDict:
    """Train as this organisation until the last round of the plan. Returns the summary.

    After an interruption of any kind, the same call resumes. `engine` is local and not part of the plan.
    """
    chain = load_chain(own)
    span = chain.find_span(own.card)
    check_device(engine.device)  # before any file is written
    newest = _with_engine(chain.at(span.last), engine)
    build_network(newest, load_data(own, newest)[2].y, own.folder)
    try:
        directory = open_directory(own, newest)
        with directory.lock():
            t = span.clamp(find_next_round(directory))
            events = Events(directory.path / "events.jsonl", on_event)
            outcome: JsonDict | _PeerRun = _PeerRun(own, _with_engine(chain.at(t), engine), loop, directory, events)
            while isinstance(outcome, _PeerRun):
                outcome = outcome.train(listen, on_round)
            return outcome
    except OSError as e:
        raise PdslError(
            f"cannot write to {own.folder}: {e.strerror}; fix that, then resume with: pdsl peer run {own.folder}"
        ) from e


def _with_engine(stage: StagePlan, engine: EngineSettings) -> StagePlan:
    return replace(stage, config=stage.config.model_copy(update={"engine": engine}))


class _PeerRun:
    """Run of one organisation in this process, in one stage of the plan."""

    def __init__(
        self,
        own: Identity,
        plan: StagePlan,
        loop: Loop,
        directory: RunDirectory,
        events: Events,
        before: "_PeerRun | None" = None,
    ):
        self.own, self.plan, self.directory, self.events, self._loop = own, plan, directory, events, loop
        self.me = plan.agent(own.card.name)
        self.names = [card.name for card in plan.members]
        self.everyone = plan.graph.neighbourhood(self.me).tolist()  # the agent itself included
        records, _, public = load_data(own, plan)
        network = build_network(plan, public.y, own.folder)
        self.transport = Transport(loop, own, plan, self.events, network.num_parameters)
        ledger = load_ledger(own, plan, directory)
        check_records(directory.path, own.folder / DATA, records, ledger)
        self.generations = Generations(directory.path, ledger, self.events)
        key, number = self.generations.key, self.generations.number
        self.e = build_experiment(
            own, plan, network, key, number, ledger.mechanism, lambda graph: PeerEngine(graph, self.transport)
        )
        self.trainers = Trainers(self.e, plan, self.me, number, self.transport.record_vectors)
        assert isinstance(self.e.engine, PeerEngine)
        self.engine: PeerEngine = self.e.engine
        privacy, batch = plan.config.privacy, plan.config.batch.size
        sigma_scale = self.e.sigma_scale
        for j in self.everyone:
            sigma = self.e.sigma[j] * sigma_scale[j].get(self.me, 1.0)
            self.engine.max_norms[j] = max_honest_norm(privacy, batch, sigma, network.num_parameters)
        self.progress: Progress = (
            load_progress(own, plan, directory, self.e, ledger, events)
            if before is None
            else continue_progress(before.progress, before.everyone, plan, directory, ledger)
        )
        self.last_row: RoundRecord = {"round": 0} if before is None else before.last_row
        self.stopped: str | None = None  # reason for ending before the last round
        self.began: float = time.monotonic() if before is None else before.began

    def train(self, listen: str | None, on_round: OnRound) -> "JsonDict | _PeerRun":
        """Run the remaining rounds of this stage. Returns the summary, or the run of the next stage."""
        self._write_setup()
        if self.progress.t > self.plan.last_round:
            return self._end_stage()
        pin_stage(self.own, self.plan)
        with ExitStack() as stack:
            stack.callback(self.generations.close)
            self.transport.start(listen)
            stack.callback(self.transport.stop)
            stack.callback(StatusWriter(self.directory.path, self.events, self._status).stop)
            if self.progress.state is not None:
                self.transport.publish_model(self.progress.state.x[0])
            with Workers(self.plan.config.engine.workers) as workers, self.transport.goodbye_on_interrupt():
                while self.progress.t <= self.plan.last_round and (row := self._run_round(workers)) is not None:
                    self.last_row = row
                    on_round(row)
            return self._end_stage()

    def _end_stage(self) -> "JsonDict | _PeerRun":
        """The summary, or the run of the next stage. Neighbours can fetch messages of this one until it is ready."""
        t, last = self.progress.t, self.plan.chain.find_span(self.own.card).last
        if self.stopped is None and self.plan.last_round < t <= last:
            stage = _with_engine(self.plan.chain.at(t), self.plan.config.engine)
            self.events.log("amended", round=t, stage=stage.hash)
            following = _PeerRun(self.own, stage, self._loop, self.directory, self.events, self)
            self.transport.end_stage()
            return following
        if self.stopped is None and last < self.plan.config.rounds:
            self.stopped = f"an amendment ended the part of {self.own.card.name} after round {last}"
        self.transport.finish()
        return self._finish()

    def _run_round(self, workers: Workers) -> RoundRecord | None:
        """Run one round, or jump to the round of the neighbours; None if training ends here."""
        p = self.progress
        start = time.monotonic()
        try:
            present, jump = self.transport.roll_call(p.t)
        except QuorumError as e:
            if self.plan.last_round < self.plan.chain.find_span(self.own.card).last:
                return self._skip_to(self.plan.last_round + 1, "no neighbours before the next amendment")
            if not p.rows:
                raise
            self.stopped = f"{e}"
            return None
        check_copy(self.own.folder, self.transport.receipts, p.ledger, self.generations.has_vectors)
        if jump == p.t:  # an amendment changed the stage of this round
            return None
        if jump is not None:
            return self._skip_to(jump, "the neighbours were ahead")
        if p.state is None:
            p.state = self._average_neighbours()
        generation = self.generations.choose(p.t, present, p.ledger)
        mark = generation.log.begin_round(p.t)
        ledger = self.generations.refund(p.t, p.ledger).charge(p.t, generation.number, present, mark)
        if not ledger.within_budget:
            self.stopped = f"round {p.t} would exceed the budget of ε = {ledger.budget:g}"
            return None
        self.engine.begin_round(p.t, present, p.ledger.peers_in(p.t))
        p.ledger, self.transport.receipts.charges = ledger, len(ledger.charges)
        self.directory.write(LEDGER, ledger.to_json(self.names).encode())
        write_charge_marker(self.own, self.plan, p.t)
        self.transport.history.charge(p.t, *ledger.describe_charge(p.t, generation.number))
        waited = time.monotonic() - start
        try:
            charged = ledger.mechanism_with(present)
            declared = {self.me: Release(charged.messages, charged.steps)}
            trainer = self.trainers.get(generation, workers)
            state, metrics = run_round(self.plan.config, p.state, trainer.round(p.t, declared=declared))
        except ConflictError as e:
            self.events.log("conflict", round=p.t, why=str(e))
            self.transport.leave_round()
            return self._skip_to(p.t + 1, "its noise was used already")
        state = keep_sums(self.plan.config, p.state, state, [self.everyone.index(j) for j in self.engine.lost])
        if not torch.isfinite(state.x).all():
            raise PdslError(
                f"diverged in round {p.t}: the model has infinite or undefined parameters; agree on a plan with a"
                " smaller algorithm.learning_rate"
            )
        row = self._row(p.t, state.x, ledger, workers)
        waited += self.engine.network_seconds
        row["seconds"], row["waited"] = round(time.monotonic() - start, 4), round(waited, 4)
        row.update(cast(RoundRecord, self._include_absent(metrics)))
        for j in self.engine.shortened:
            self.events.log("shortened", round=p.t, who=self.names[j])
        for name in row.get("implausible", ()):
            self.events.log("implausible", round=p.t, who=name)
        self._commit(p.t, state, row)
        return row

    def _commit(self, t: int, state: State, row: RoundRecord) -> None:
        """Complete a round: first on disk, then in memory."""
        p = self.progress
        self.transport.history.mix(t, self.engine.describe_mixing())
        self.directory.append(row)
        self.directory.save(Checkpoint(t, state_tensors(state), time.monotonic() - self.began))
        self.directory.prune()
        self.transport.receipts.save()
        self.transport.publish_model(state.x[0])
        self.progress = Progress(t + 1, state, [*p.rows, row], p.ledger)

    def _skip_to(self, t: int, reason: str) -> RoundRecord:
        """Continue at a later round t. Returns the last row of the skipped rounds."""
        p = self.progress
        self.events.log("missed", first=p.t, last=t - 1, why=reason)
        if t > self.plan.config.rounds:
            self.stopped = f"rounds {p.t} to {t - 1} were skipped: {reason}"
        absent = [absent_row(missed) for missed in range(p.t, t)]
        for row in absent:
            self.directory.append(row)
        self.progress = replace(p, t=t, rows=[*p.rows, *absent])
        return absent[-1]

    def _average_neighbours(self) -> State:
        """Initial state after the loss of all checkpoints: the mean of the neighbours' models."""
        models = self.transport.fetch_models()
        if not models:
            raise PdslError(
                f"{self.directory.path} has no intact checkpoint, and no neighbour offers its model; run again later"
            )
        reason = "no intact checkpoint: started from the mean of the neighbours' models"
        self.events.log("restarted", why=reason, models=len(models))
        x = torch.stack(models).mean(0, keepdim=True)
        return make_state(self.plan.config, x.to(self.plan.config.engine.device))

    def _row(self, t: int, x: Tensor, ledger: PeerLedger, workers: Workers) -> RoundRecord:
        engine = self.engine
        row: RoundRecord = {"round": t, "messages": engine.messages, "bytes": engine.bytes}
        engine.messages = engine.bytes = engine.bytes_between_processes = 0
        row["present"] = [self.names[j] for j in engine.sender.tolist() if j != self.me]
        if engine.shortened:
            row["shortened"] = [self.names[j] for j in engine.shortened]
        if engine.lost:  # the other end may disagree, so W may not be doubly stochastic in this round
            row["lost"] = {self.names[j]: phase for j, phase in engine.lost.items()}
        if t % self.plan.config.evaluate_every == 0:
            row["epsilon"] = finite(ledger.epsilon)
            row.update(cast(RoundRecord, evaluate(self.e, x, engine.mean(x), workers).as_row()))
        return row

    def _include_absent(self, metrics: JsonDict) -> JsonDict:
        """Extend Shapley values to the whole neighbourhood, with 0 for absent neighbours. Name implausible senders."""
        if "implausible" in metrics:
            metrics = {**metrics, "implausible": [self.names[j] for j in metrics["implausible"]]}
        shapley = metrics.get("shapley")
        if shapley is None:
            return metrics
        planned, present = self.plan.plan_members(self.me), self.engine.sender.tolist()
        return {**metrics, "shapley": spread_values(shapley, present, self.progress.ledger, planned)}

    def _status(self) -> Status:
        state = self.transport.state
        return Status(
            time=time.time(),
            pid=os.getpid(),
            running=True,
            name=self.own.card.name,
            plan=self.plan.original_hash,
            round=state.round,
            rounds=self.plan.config.rounds,
            doing="roll call" if state.gathering else "waiting" if state.waiting else "computing",
            accuracy=self.last_row.get("accuracy"),
            epsilon=self.last_row.get("epsilon"),
            budget=self.progress.ledger.budget,
            refused=self.events.counts["refused"],
            neighbours=self.transport.neighbour_statuses(),
            completed=self.progress.t > self.plan.chain.find_span(self.own.card).last,
            network_pause=self.transport.calls.pause,
        )

    def _write_setup(self) -> None:
        setup = self.e.metadata()
        weights = {j: weight for i, j, weight in setup["edges"] if i == self.me}
        setup["edges"] = [[self.me, j, weights.get(j, 0.0)] for j in find_members(self.progress.ledger)]
        setup |= {"name": self.own.card.name, "agent": self.me, "names": self.names, "plan": self.plan.original_hash}
        self.directory.describe(self.e.config.to_toml(), setup, self.e.owner_metadata())

    def _finish(self) -> JsonDict:
        """Write model, summary and report. Returns the summary."""
        p = self.progress
        if p.state is None and p.ledger.charges:
            raise PdslError(f"{self.directory.path} has no intact checkpoint, and the plan's rounds are over")
        if p.state is None or not p.rows:
            raise PdslError("no round was run: the budget or the neighbours did not allow one")
        evaluation = final_evaluation(self.e, p.state.x)
        self.directory.write("model.safetensors", pack_model(self.e, self.e.network.to_module(p.state.x[0])))
        if (features := self.e.public.features) is not None and features.path is not None:
            self.directory.link(FEATURES, features.path)
        run = [row for row in p.rows if "absent" not in row]
        baselines = compute_baselines(self.e)  # of the public set alone, because the noise is secret
        gain = describe_gain(evaluation.score, baselines, evaluation.metric, self.e.task.higher_is_better)
        summary = {
            "name": self.own.card.name,
            "agent": self.me,
            "plan": self.plan.original_hash,
            "stage": self.plan.hash,
            "generation": self.generations.number,
            "stopped": self.stopped,
            "refused": self.events.counts["refused"],
            "seconds": round(time.monotonic() - self.began, 3),
            "metric": evaluation.metric,
            evaluation.metric: evaluation.score,
            f"{evaluation.metric}_of_mean": evaluation.score_of_mean,
            f"{evaluation.metric}_per_agent": evaluation.scores,
            "loss": evaluation.loss,
            "rounds": len(p.rows),
            "rounds_run": len(run),
            "neighbour_rounds_lost": sum(len(row.get("lost", ())) for row in run),
            "epsilon": finite(p.ledger.epsilon),
            "delta": p.ledger.delta,
            "budget": p.ledger.budget,
            "privacy": statement(
                self.plan.config.privacy, p.ledger.to_run_ledger(), [p.ledger.mechanism], self.e.public.uses
            ),
            "sigma": max(p.ledger.mechanism.sigmas),
            "messages": sum(row["messages"] for row in run),
            "bytes": sum(row["bytes"] for row in run),
            "model_sha256": evaluation.digests[0],
            "baselines": baselines,
            "gain": gain,
            "waited_for": self.transport.waited_for(),
            "notes": self.transport.describe_delays(time.monotonic() - self.began),
            "run": str(self.directory.path),
            "statement": write_statement(self.own, self.plan, self.directory, p.state, p.rows, p.ledger),
        }
        self.directory.write("summary.json", json.dumps(summary, indent=2, ensure_ascii=False).encode())
        write_report(self.directory.path)
        return summary
