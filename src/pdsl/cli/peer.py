"""Commands of peer mode: pdsl peer init | invite | join | pin | run | status | demo. Others have their own modules.

A command imports heavy modules when it runs, so that `--help` is fast.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from pdsl.cli import peer_members, peer_operations
from pdsl.cli.common import INTERRUPTED
from pdsl.cli.settle import settle
from pdsl.utils.errors import PdslError
from pdsl.utils.format import format_epsilon

if TYPE_CHECKING:
    from pdsl.peer.status import Status
    from pdsl.utils.types import JsonDict

app = typer.Typer(help="Train with other organisations, each on its own machine and its own data.")
app.command()(peer_operations.doctor)
app.command()(peer_operations.health)
app.command()(peer_operations.recover)

Folder = Annotated[Path, typer.Argument(help="Folder of this organisation.")]
MISTAKE, INCOMPLETE = 2, 3  # exit codes: a mistake of the user, and a run with fewer rounds than planned

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Assignments = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, for example --set rounds=50.")
]


@app.command()
def init(
    folder: Folder,
    name: Annotated[str | None, typer.Option(help="Short name of a-z, 0-9 and '-'.")] = None,
    address: Annotated[
        str | None, typer.Option(help="host:port at which neighbours reach this organisation; none if they cannot.")
    ] = None,
    renew: Annotated[bool, typer.Option(help="Replace the key and the certificate.")] = False,
) -> None:
    """Create a folder with a private key, a certificate and a card for the plan's author."""
    from pdsl.peer.identity import CARD, Identity

    if renew:
        own = Identity.renew(folder, name, address)
        print(f"New certificate {own.card.fingerprint}.\nSend {folder / CARD} to your neighbours, who must pin it.")
        return
    if name is None or address is None:
        raise PdslError("a new folder needs --name and --address, like --name clinic --address peer.example.org:7443")
    own = Identity.create(folder, name, address)
    print(
        f"Certificate {own.card.fingerprint}.\nSend {folder / CARD} to the plan's author. Keep everything else private."
    )


@app.command()
def invite(
    cards: Annotated[list[Path], typer.Argument(help="Cards of the members, in the order of agents.")],
    public: Annotated[Path, typer.Option(help="Public file (npz) with x_validation, y_validation, x_test, y_test.")],
    records: Annotated[
        float, typer.Option(help="Public estimate of an average member's records; determines the sampling rate.")
    ],
    out: Annotated[Path, typer.Option(help="Plan file to write.")] = Path("plan.toml"),
    config: Annotated[Path | None, typer.Option(help="Settings as TOML, as for pdsl run.")] = None,
    assignments: Assignments = [],  # noqa: B006  typer's empty default
    classes: Annotated[
        int | None, typer.Option(help="Number of classes, if the public file lacks some of them.")
    ] = None,
    silence: Annotated[
        float, typer.Option(help="Seconds without a response after which a neighbour is skipped for the round.")
    ] = 10.0,
    patience: Annotated[
        float,
        typer.Option(help="How long to wait for a peer that is itself blocked on an unresponsive peer, in seconds."),
    ] = 2.0,
    deadline: Annotated[
        float, typer.Option(help="Seconds without progress after which a responsive neighbour is skipped.")
    ] = 120.0,
    start: Annotated[
        float, typer.Option(help="Seconds to wait for neighbours that have not been online yet.")
    ] = 3600.0,
    quorum: Annotated[int, typer.Option(help="Neighbours that must be present for a round to start.")] = 1,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PACKAGE.MODULE:CALLABLE",
            help="Your torch.nn.Sequential: its layers go into the plan, its weights into weights.safetensors.",
        ),
    ] = None,
    author: Annotated[str, typer.Option(help="Name of the plan's author, shown to the members.")] = "",
) -> None:
    """Write a training plan: the members and all settings that they must agree on. It contains no secrets."""
    from pdsl.peer.experiment import check_budget, describe_task
    from pdsl.peer.identity import WEIGHTS, PeerInfo
    from pdsl.peer.model_export import export_model, import_model
    from pdsl.peer.plan import Timeouts, compose, format_hash, validate_section
    from pdsl.utils.files import write_whole

    seconds = {"silence": silence, "patience": patience, "deadline": deadline, "start": start}
    timeouts = validate_section(Timeouts, "timeouts", {**seconds, "quorum": quorum}, "pdsl peer invite")
    task = describe_task(public, records, classes)
    own = None if model is None else export_model(import_model(model))
    settings = None if own is None else own.settings
    plan = compose([PeerInfo.read(card) for card in cards], config, assignments, task, timeouts, settings, author)
    check_budget(plan)
    if own is not None:
        write_whole(out.with_name(WEIGHTS), own.weights)
    write_whole(out, plan.to_toml().encode())
    weights = f" and the file of weights, named {WEIGHTS}," if plan.config.model.weights_sha256 else ""
    print(f"Wrote {out}. Send it and {public.name}{weights} to the {len(plan.members)} members.")
    print(f"hash {format_hash(plan.hash)}")


@app.command()
def join(
    folder: Folder,
    plan: Annotated[Path, typer.Argument(help="Plan file from its author.")],
    code: Annotated[
        list[str], typer.Option(help="Confirm installed code that the plan runs, by 16 or more digits of its SHA-256.")
    ] = [],  # noqa: B006  typer's empty default
    amendments: Annotated[
        list[Path], typer.Option("--amendment", help="Amendment of the plan, in order, for a member that joins later.")
    ] = [],  # noqa: B006  typer's empty default
) -> None:
    """Check a plan and pin the neighbours' certificates. Compare the hash with the other members before you run."""
    from pdsl.peer.amendment import Amendment
    from pdsl.peer.experiment import check_budget
    from pdsl.peer.identity import Identity
    from pdsl.peer.membership import join as join_plan
    from pdsl.peer.membership import load_plan
    from pdsl.peer.plan import TrainingPlan, format_hash
    from pdsl.peer.source_check import check_confirmed, check_sources
    from pdsl.peer.summary import check_files, describe_plan

    own, read = Identity.load(folder), TrainingPlan.read(plan)
    check_sources(read.sources)
    check_confirmed(read.sources, code)
    check_budget(read)
    missing = check_files(own, read)
    neighbours = join_plan(own, read, [Amendment.read(amendment) for amendment in amendments])
    stage = load_plan(own)
    print(f"{own.card.name} is agent {stage.agent(own.card.name)} of {len(stage.members)}: {stage.graph.describe()}")
    for line in (*describe_plan(read), *(a.describe() for a in stage.chain.amendments), *missing):
        print(line)
    for j in neighbours:
        card = stage.members[j]
        print(f"neighbour {card.name} at {card.address}, certificate {card.fingerprint}")
    print(f"hash {format_hash(stage.hash)}\nCompare this hash with all other members before you run.")


@app.command()
def pin(
    folder: Folder,
    card: Annotated[Path | None, typer.Argument(help="New card of a neighbour, accepted besides the old one.")] = None,
    revoke: Annotated[
        str | None, typer.Option(help="Revoke the certificate whose fingerprint starts with this.")
    ] = None,
) -> None:
    """Accept a neighbour's new certificate, or revoke one. Without arguments, list the pinned certificates."""
    from pdsl.peer.identity import PINS, Identity, PeerInfo, fingerprint
    from pdsl.peer.membership import load_plan
    from pdsl.peer.routes import find_contacts
    from pdsl.peer.trust_store import TrustStore

    own = Identity.load(folder)
    plan = load_plan(own)
    trust_store = TrustStore(own.folder / PINS)
    neighbours = [plan.members[j].name for j in find_contacts(plan, plan.agent(own.card.name))]
    if card is not None:
        read = PeerInfo.read(card)
        if read.name not in neighbours:
            raise PdslError(f"{read.name} is not a neighbour of {own.card.name} in this plan; nothing was pinned")
        if trust_store.add(read):
            print(f"{read.name}: the pin file was damaged and now has only this certificate")
        print(f"{read.name}: {read.fingerprint} is accepted from now on")
    if revoke is not None:
        revoked = trust_store.revoke(revoke)
        print(f"{revoked.name}: {revoked.fingerprint} is refused from now on")
    if card is None and revoke is None:
        pinned = {name: [fingerprint(pem) for pem in trust_store.certificates(name)] for name in neighbours}
        for name, fingerprints in pinned.items():
            print(f"{name}: {', '.join(fingerprints) or 'no pin'}")


@app.command()
def run(
    folder: Folder,
    listen: Annotated[
        str | None, typer.Option(help="host:port to listen on, if not the card's address; none: open all connections.")
    ] = None,
    device: Annotated[str, typer.Option(help="torch device: cpu, cuda, cuda:1, mps.")] = "cpu",
    workers: Annotated[int | None, typer.Option(min=1, help="Single-threaded workers; default: one per core.")] = None,
    as_json: AsJson = False,
    log_json: Annotated[
        bool, typer.Option("--log-json", help="Log rounds and events to standard error as JSON lines.")
    ] = False,
) -> None:
    """Wait for the neighbours, train, and write this organisation's model, ledger and report to FOLDER/run.

    The exit code is 0 if all rounds of the plan were run, 3 if fewer were, and 130 or 143 after Ctrl-C or SIGTERM.
    """
    from pdsl.peer.termination import InterruptedRunError, exit_at_once, handle_signals

    try:
        with handle_signals():
            summary, rounds = (_run_logged if log_json else _run_peer)(folder, listen, device, workers)
    except KeyboardInterrupt as e:
        if not log_json:
            print(f"pdsl: interrupted; resume with: pdsl peer run {folder}", file=sys.stderr)
        if isinstance(e, InterruptedRunError):
            exit_at_once(e.exit_code)
        raise SystemExit(INTERRUPTED) from None
    if as_json:
        print(json.dumps(summary))
    else:
        _print_summary(summary, rounds)
    if summary["rounds_run"] < rounds:
        raise SystemExit(INCOMPLETE)


def _run_peer(folder: Path, listen: str | None, device: str, workers: int | None) -> "tuple[JsonDict, int]":
    """Run until the last round. Returns the summary, and the number of rounds of this member."""
    from pdsl.peer.identity import Identity
    from pdsl.peer.membership import load_chain
    from pdsl.peer.runner import run as run_peer
    from pdsl.peer.transport import Loop
    from pdsl.runs.listeners import Progress
    from pdsl.settings import EngineSettings

    own = Identity.load(folder)
    loop = Loop()
    try:
        with Progress(_console(stderr=True), load_chain(own).newest.config.rounds) as progress:
            engine = EngineSettings(device=device, workers=workers)
            summary = run_peer(own, loop, listen, progress.on_round, engine)
        first, last = load_chain(own).find_span(own.card)
        return summary, last - first + 1
    finally:
        loop.close()


def _run_logged(folder: Path, listen: str | None, device: str, workers: int | None) -> "tuple[JsonDict, int]":
    """Run until the last round, with a log in JSON lines. A mistake is a line of the log too."""
    from pdsl import __version__
    from pdsl.peer.identity import Identity
    from pdsl.peer.log_lines import LogLines
    from pdsl.peer.membership import load_chain, load_plan
    from pdsl.peer.runner import run as run_peer
    from pdsl.peer.transport import Loop
    from pdsl.settings import EngineSettings

    log, loop = LogLines(open(os.dup(2), "wb", buffering=0)), Loop()  # noqa: PTH123, SIM115  open until the end
    try:
        own = Identity.load(folder)
        stage = load_plan(own)
        log.log("start", name=own.card.name, plan=stage.hash, pdsl=__version__, rounds=stage.config.rounds)
        engine = EngineSettings(device=device, workers=workers)
        summary = run_peer(own, loop, listen, log.on_round, engine, log.write)
        log.log("end", rounds_run=summary["rounds_run"], stopped=summary["stopped"], epsilon=summary["epsilon"])
        first, last = load_chain(own).find_span(own.card)
        return summary, last - first + 1
    except KeyboardInterrupt:
        log.log("interrupted", advice=f"resume with: pdsl peer run {folder}")
        raise
    except PdslError as e:
        log.log("failed", why=str(e))
        raise SystemExit(MISTAKE) from None
    finally:
        loop.close()
        log.stop()


def _print_summary(summary: "JsonDict", rounds: int) -> None:
    table = Table(show_header=False, title=f"{summary['name']}: {summary['rounds_run']} of {rounds} rounds")
    for label in (summary["metric"], "epsilon", "privacy", "neighbour_rounds_lost", "refused", "seconds"):
        table.add_row(label.replace("_", " "), f"{summary[label]}")
    if summary["gain"]:
        table.add_row("conclusion", summary["gain"])
    if summary["stopped"]:
        table.add_row("stopped early", summary["stopped"])
    table.add_row("model", f"{summary['run']}/model.safetensors")
    table.add_row("report", f"{summary['run']}/report.html")
    if summary["statement"]:
        table.add_row("statement", summary["statement"])
    _console().print(table)


@app.command()
def status(
    folder: Folder,
    watch: Annotated[bool, typer.Option(help="Update until interrupted.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the state of this organisation's process and its neighbours."""
    from pdsl.peer.identity import Identity
    from pdsl.peer.status import read_status, status_table

    Identity.load(folder)
    current = read_status(folder)
    if current is None:
        raise PdslError(f"{folder} has not run yet; start it with: pdsl peer run {folder}")
    if as_json:
        print(json.dumps(current.model_dump()))
        return
    if not watch:
        _console().print(status_table([current]))
        return
    with Live(status_table([current]), console=_console(), auto_refresh=False) as live:
        while current is not None:
            live.update(status_table([current]), refresh=True)
            time.sleep(1)
            current = read_status(folder)


app.command()(settle)
peer_members.register(app)


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Folder for the four organisations; default runs/peer-demo.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds.")] = 30,
    as_json: AsJson = False,
) -> None:
    """Run four organisations on this machine, from keys to trained models, in about a minute."""
    from pdsl.peer.demo import run_demo
    from pdsl.peer.status import status_table
    from pdsl.runs.directory import unused

    folder = out or unused(Path("runs"), "peer-demo")
    console = _console(stderr=True)
    with Live(console=console, auto_refresh=False, transient=not console.is_terminal) as live:

        def on_status(statuses: "list[Status]") -> None:
            if console.is_terminal:
                live.update(status_table(statuses), refresh=True)

        result = run_demo(folder, rounds, lambda line: console.print(line, soft_wrap=True), on_status)
    if as_json:
        print(json.dumps(result))
        return
    table = Table("peer", "accuracy", "ε", "rounds", "MB sent", header_style="bold")
    for peer in result["peers"]:
        accuracy, spent = f"{peer['accuracy']:.4f}", format_epsilon(peer["epsilon"])
        table.add_row(peer["name"], accuracy, spent, f"{peer['rounds']}", f"{peer['bytes'] / 1e6:.2f}")
    _console().print(table)
    for peer in result["peers"]:
        print(f"{peer['name']}: {peer['gain']}")
    print(f"{result['seconds']:.0f} s. Model, ledger and report of each organisation are in {folder}/<name>/run.")
    print(f"Their contributions: pdsl peer settle {folder / result['peers'][0]['name']} {folder}/*/run/statement.json")


def _console(stderr: bool = False) -> Console:
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)
