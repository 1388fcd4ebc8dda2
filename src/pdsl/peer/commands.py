"""The commands: pdsl peer init | invite | join | pin | run | status | demo. Each imports what it needs when it runs."""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from pdsl.errors import PdslError
from pdsl.rounded import rounded_up

if TYPE_CHECKING:
    from pdsl.peer.plan import Plan

app = typer.Typer(help="Train with other organisations, each on its own machine with its own data.")

Folder = Annotated[Path, typer.Argument(help="This organisation's folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Assignments = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, like --set rounds=50.")
]


@app.command()
def init(
    folder: Folder,
    name: Annotated[str | None, typer.Option(help="Short name: a-z, 0-9 and '-'.")] = None,
    address: Annotated[str | None, typer.Option(help="host:port at which the neighbours reach you.")] = None,
    renew: Annotated[bool, typer.Option(help="A new key and certificate; the old ones may be lost.")] = False,
) -> None:
    """Make a folder with a key, a certificate and a card to send to who writes the plan."""
    from pdsl.peer.identity import CARD, Identity

    if renew:
        made = Identity.renew(folder, name, address)
        print(f"new certificate {made.card.fingerprint}; send {folder / CARD} to your neighbours, who pin it")
        return
    if name is None or address is None:
        raise PdslError("a new folder needs --name and --address, like --name clinic --address peer.example.org:7443")
    made = Identity.create(folder, name, address)
    print(
        f"certificate {made.card.fingerprint}; send {folder / CARD} to who writes the plan, keep the rest to yourself"
    )


@app.command()
def invite(
    cards: Annotated[list[Path], typer.Argument(help="The members' cards, in the order of agents.")],
    public: Annotated[Path, typer.Option(help="public.npz: x_validation, y_validation, x_test, y_test.")],
    records: Annotated[float, typer.Option(help="Records of an average member; public, decides the sampling rate.")],
    out: Annotated[Path, typer.Option(help="The plan, to send to everybody.")] = Path("plan.toml"),
    config: Annotated[Path | None, typer.Option(help="Settings as TOML, as for pdsl run.")] = None,
    assignments: Assignments = [],  # noqa: B006  typer's way to say none
    classes: Annotated[int | None, typer.Option(help="Classes, if the public file does not have them all.")] = None,
    silence: Annotated[float, typer.Option(help="Seconds without a sign of life: out of the round.")] = 10.0,
    patience: Annotated[float, typer.Option(help="Seconds for one that waits for a silent one: then out.")] = 2.0,
    deadline: Annotated[float, typer.Option(help="Seconds that a live neighbour may take: then out.")] = 120.0,
    start: Annotated[float, typer.Option(help="Seconds to wait for neighbours that have not come yet.")] = 3600.0,
    quorum: Annotated[int, typer.Option(help="Neighbours that must be there for a round to begin.")] = 1,
) -> None:
    """Write the plan: who takes part, and everything they must agree on. Nothing in it is secret."""
    from pdsl.files import write_whole
    from pdsl.peer.identity import Card
    from pdsl.peer.plan import Conduct, compose, section, spoken
    from pdsl.peer.task import public_task

    waits = {"silence": silence, "patience": patience, "deadline": deadline, "start": start, "quorum": quorum}
    conduct = section(Conduct, waits, "pdsl peer invite")
    plan = compose(
        [Card.read(card) for card in cards], config, assignments, public_task(public, records, classes), conduct
    )
    _check_noise(plan)
    write_whole(out, plan.to_toml().encode())
    print(f"{out}: send it and {public.name} to the {len(plan.members)} members\nhash {spoken(plan.hash)}")


@app.command()
def join(folder: Folder, plan: Annotated[Path, typer.Argument(help="The plan you were sent.")]) -> None:
    """Check a plan and accept its neighbours' certificates. Read the hash to the others before you run."""
    from pdsl.peer.identity import Identity
    from pdsl.peer.join import join as join_plan
    from pdsl.peer.plan import Plan, spoken

    own, read = Identity.load(folder), Plan.read(plan)
    _check_noise(read)
    neighbours = join_plan(own, read)
    config = read.config
    print(f"{own.card.name} is agent {read.agent(own.card.name)} of {len(read.members)}: {read.graph.describe()}")
    print(
        f"{config.algorithm.name}, {config.rounds} rounds, total ε {config.privacy.budget} at δ {config.privacy.delta}"
    )
    for j in neighbours:
        card = read.members[j]
        print(f"neighbour {card.name} at {card.address}, certificate {card.fingerprint}")
    print(f"hash {spoken(read.hash)}\nthe same hash must be read by all: compare it with theirs before you run")


@app.command()
def pin(
    folder: Folder,
    card: Annotated[Path | None, typer.Argument(help="A neighbour's new card, to accept besides the old.")] = None,
    revoke: Annotated[str | None, typer.Option(help="Remove the pin whose fingerprint begins so.")] = None,
) -> None:
    """Accept a neighbour's new certificate, or stop accepting one; without either, list them."""
    from pdsl.peer.identity import Card, Identity, fingerprint
    from pdsl.peer.join import PINS, joined
    from pdsl.peer.pins import Pins

    own = Identity.load(folder)
    plan = joined(own)
    pins = Pins(own.folder / PINS)
    neighbours = [plan.members[j].name for j in plan.neighbours(plan.agent(own.card.name))]
    if card is not None:
        read = Card.read(card)
        if read.name not in neighbours:
            raise PdslError(f"{read.name} is no neighbour of {own.card.name} in this plan; nothing was pinned")
        if pins.add(read):
            print(f"{read.name}: its pin file was damaged; it now has this certificate and no other")
        print(f"{read.name}: {read.fingerprint} is accepted when 'pdsl peer run' is started again")
    if revoke is not None:
        gone = pins.revoke(revoke)
        print(f"{gone.name}: {gone.fingerprint} is refused from now on")
    if card is None and revoke is None:
        listed = {name: [fingerprint(pem) for pem in pins.of(name)] for name in neighbours}
        for name, pinned in listed.items():
            print(f"{name}: {', '.join(pinned) or 'no pin'}")


@app.command()
def run(
    folder: Folder,
    listen: Annotated[str | None, typer.Option(help="host:port to listen on, if not the card's address.")] = None,
    device: Annotated[str, typer.Option(help="torch device: cpu, cuda, cuda:1, mps.")] = "cpu",
    workers: Annotated[int | None, typer.Option(min=1, help="Single-threaded workers; default: one per core.")] = None,
    as_json: AsJson = False,
) -> None:
    """Wait for the neighbours, train, and end with this organisation's model, ledger and page in FOLDER/run."""
    from pdsl.peer.identity import Identity
    from pdsl.peer.join import joined
    from pdsl.peer.overheard import overhearing
    from pdsl.peer.run import run as run_peer
    from pdsl.peer.transport import Loop
    from pdsl.progress import Progress
    from pdsl.settings import EngineSettings

    own = Identity.load(folder)
    rounds = joined(own).config.rounds
    loop = Loop()
    try:
        with (
            overhearing() as overheard,
            Progress(Console(stderr=True, markup=False, emoji=False, highlight=False), rounds) as progress,
        ):
            engine = EngineSettings(device=device, workers=workers)
            summary = run_peer(own, loop, listen, progress.row, engine, overheard)
    except KeyboardInterrupt:
        print(f"pdsl: interrupted; continue with: pdsl peer run {folder}", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        loop.close()
    if as_json:
        print(json.dumps(summary))
        return
    table = Table(show_header=False, title=f"{summary['name']}, {summary['rounds_run']} of {rounds} rounds")
    for label in ("accuracy", "epsilon", "privacy", "neighbour_rounds_lost", "refused", "seconds"):
        table.add_row(label.replace("_", " "), f"{summary[label]}")
    if summary["stopped"]:
        table.add_row("stopped", summary["stopped"])
    table.add_row("model", f"{summary['run']}/model.safetensors")
    table.add_row("page", f"{summary['run']}/report.html")
    _console().print(table)


@app.command()
def status(
    folder: Folder,
    watch: Annotated[bool, typer.Option(help="Go on showing it until interrupted.")] = False,
    as_json: AsJson = False,
) -> None:
    """How this organisation's process and its neighbours are doing."""
    from pdsl.peer.identity import Identity
    from pdsl.peer.status import read_status, status_table

    Identity.load(folder)
    now = read_status(folder)
    if now is None:
        raise PdslError(f"{folder} has not run yet; 'pdsl peer run {folder}' starts it")
    if as_json:
        print(json.dumps(now))
        return
    if not watch:
        _console().print(status_table([now]))
        return
    with Live(status_table([now]), console=_console(), auto_refresh=False) as live:
        while now is not None:
            live.update(status_table([now]), refresh=True)
            time.sleep(1)
            now = read_status(folder)


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Folder for the four organisations; default runs/peer-demo.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to train.")] = 30,
    as_json: AsJson = False,
) -> None:
    """Four organisations on this machine, from their keys to their models, in about a minute."""
    from pdsl.peer.demo import demonstrate
    from pdsl.peer.status import status_table
    from pdsl.runs import unused

    folder = out or unused(Path("runs"), "peer-demo")
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    with Live(console=console, auto_refresh=False, transient=not console.is_terminal) as live:

        def show(statuses: list[dict[str, Any]]) -> None:
            if console.is_terminal:
                live.update(status_table(statuses), refresh=True)

        result = demonstrate(folder, rounds, lambda line: console.print(line, soft_wrap=True), show)
    if as_json:
        print(json.dumps(result))
        return
    table = Table("peer", "accuracy", "ε", "rounds", "MB sent", header_style="bold")
    for peer in result["peers"]:
        sent = f"{peer['bytes'] / 1e6:.2f}"
        table.add_row(peer["name"], f"{peer['accuracy']:.4f}", rounded_up(peer["epsilon"]), f"{peer['rounds']}", sent)
    _console().print(table)
    print(f"{result['seconds']:.0f} s; each organisation's model, ledger and page are in {folder}/<name>/run")


def _check_noise(plan: "Plan") -> None:
    """Refuse a plan that nobody could run: no noise meets its target, or its budget pays for no round.

    It takes a second or two, so that it is done once, and not whenever a plan is read.
    """
    from pdsl.peer.task import agreed_mechanisms
    from pdsl.privacy import epsilon

    privacy = plan.config.privacy
    assert privacy.budget is not None  # a plan has one
    for mechanism in set(agreed_mechanisms(plan)):
        if (spent := epsilon(((mechanism, 1),), privacy.delta)) > privacy.budget:
            raise PdslError(
                f"plan: one round spends ε = {rounded_up(spent)}, more than privacy.target_epsilon={privacy.budget:g};"
                " ask for more noise, or for a larger target"
            )


def _console() -> Console:
    return Console(markup=False, emoji=False, highlight=False)
