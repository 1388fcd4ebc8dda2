"""Commands for members that come and go: pdsl peer leave | admit | replace | sign | amend."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdsl.utils.errors import PdslError

if TYPE_CHECKING:
    from pdsl.peer.amendment import Amendment
    from pdsl.peer.identity import Identity

Folder = Annotated[Path, typer.Argument(help="Folder of this organisation.")]
FromRound = Annotated[int, typer.Option("--from-round", min=2, help="First round in which the change is in force.")]
Out = Annotated[Path, typer.Option(help="Amendment file to write.")]
File = Annotated[Path, typer.Argument(help="Amendment file.")]
Card = Annotated[Path, typer.Argument(help="Card of the new member, or of the new machine.")]


def leave(
    folder: Folder,
    from_round: FromRound,
    member: Annotated[
        str | None,
        typer.Option(help="A silent neighbour that leaves; all its neighbours must sign. Default: yourself."),
    ] = None,
    out: Out = Path("leave.toml"),
) -> None:
    """Leave the plan for good, or record that a silent neighbour has left: write a signed amendment."""
    from pdsl.peer.amending import propose
    from pdsl.peer.identity import Identity

    own = Identity.load(folder)
    _write(own, propose(own, "leave", member or own.card.name, from_round), out)


def admit(
    folder: Folder,
    card: Card,
    from_round: FromRound,
    neighbours: Annotated[list[str], typer.Option("--neighbour", help="Neighbour of the new member; all must sign.")],
    out: Out = Path("join.toml"),
) -> None:
    """Admit a new member: write an amendment that all its future neighbours sign."""
    from pdsl.peer.amending import propose
    from pdsl.peer.identity import Identity, PeerInfo

    own, new = Identity.load(folder), PeerInfo.read(card)
    _write(own, propose(own, "join", new.name, from_round, new, neighbours), out)


def replace(folder: Folder, card: Card, from_round: FromRound, out: Out = Path("replace.toml")) -> None:
    """Replace the machine, key or address of a member: write an amendment signed by its old key, or all neighbours."""
    from pdsl.peer.amending import propose
    from pdsl.peer.identity import Identity, PeerInfo

    own, new = Identity.load(folder), PeerInfo.read(card)
    _write(own, propose(own, "replace", new.name, from_round, new), out)


def sign(folder: Folder, amendment: File) -> None:
    """Show an amendment and add your signature to the file. Compare its hash with the other members before."""
    from pdsl.peer.amending import sign as add_signature
    from pdsl.peer.amendment import Amendment
    from pdsl.peer.identity import Identity

    own = Identity.load(folder)
    _write(own, add_signature(own, Amendment.read(amendment)), amendment)


def amend(
    folder: Folder,
    amendment: File,
    late: Annotated[
        bool, typer.Option(help="Apply it although its first round is over; it is in force at once.")
    ] = False,
) -> None:
    """Apply a signed amendment of the plan. A running peer uses it without a restart."""
    from pdsl.peer.amending import apply
    from pdsl.peer.amendment import Amendment
    from pdsl.peer.identity import Identity
    from pdsl.peer.plan import format_hash

    own, read = Identity.load(folder), Amendment.read(amendment)
    stage = apply(own, read, late)
    print(read.describe())
    if stage.card(own.card.name) is not None:
        print(f"your neighbours from then on: {', '.join(stage.neighbour_names(own.card.name))}")
    print(f"hash {format_hash(read.hash)}\nCompare this hash with all other members.")


def _write(own: "Identity", amendment: "Amendment", out: Path) -> None:
    """Write an amendment, and say what is next."""
    from pdsl.peer.amending import find_missing
    from pdsl.peer.plan import format_hash
    from pdsl.utils.files import write_whole

    if not out.parent.is_dir():
        raise PdslError(f"there is no folder {out.parent}; choose another --out")
    write_whole(out, amendment.to_toml().encode())
    print(amendment.describe())
    missing = " or ".join(", ".join(names) for names in find_missing(own, amendment))
    print(f"Wrote {out}. Still to sign: {missing}." if missing else f"Wrote {out}. Send it to all members to apply.")
    print(f"hash {format_hash(amendment.hash)}")


def register(app: typer.Typer) -> None:
    for command in (leave, admit, replace, sign, amend):
        app.command()(command)
