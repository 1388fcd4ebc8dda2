"""Check of an organisation's folder, machine and neighbours: one line each, with what to do.

It works before a run and during one, and disturbs no running peer: the data are read and the port is tried only if no
peer runs here.
"""

import datetime
import errno
import json
import os
import shutil
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509

from pdsl import __version__
from pdsl.peer.experiment import build_network, load_data
from pdsl.peer.identity import CHARGE_MARKER, NO_ADDRESS, PINS, RUN, Identity
from pdsl.peer.membership import check_charge_marker
from pdsl.peer.messages import PROTOCOL
from pdsl.peer.plan import TrainingPlan, format_hash
from pdsl.peer.probe import Contact, probe_all
from pdsl.peer.receipts import FILE as RECEIPTS
from pdsl.peer.receipts import Receipts
from pdsl.peer.status import Status, read_status
from pdsl.peer.trust_store import TrustStore
from pdsl.runs.directory import LEDGER
from pdsl.utils.errors import PdslError

MIN_FREE = 200 * 10**6  # bytes on the disk, besides the model's files
CHECKPOINT_VECTORS = 20  # of the model's size, for checkpoints and results
SLOW_SYNC = 1.0  # seconds; every round waits for several
MAX_CLOCK_DIFFERENCE = 5.0  # seconds
EXPIRY_DAYS = 30


class Finding(NamedTuple):
    """One line of the result."""

    ok: bool
    text: str


def examine(own: Identity, plan: TrainingPlan, listen: str | None = None) -> list[Finding]:
    """Check everything that a run needs."""
    status = read_status(own.folder)
    running = status if status is not None and status.running else None
    found = [
        _check_process(own, running),
        *_check_data(own, plan, running is not None),
        _check_sync(own.folder),
        *_check_certificates(own, plan),
    ]
    if running is None:
        found.append(_check_port(listen or own.card.address))
    contacts = probe_all(own, plan)
    for j, contact in contacts.items():
        name = plan.members[j].name
        if contact is None:
            found.append(_check_caller(name, running, plan.timeouts.silence))
        else:
            found += [Finding(ok, f"{name}: {text}") for ok, text in _check_contact(own, plan, contact, running)]
    found.append(_check_ledger(own, plan, contacts))
    return found


def _check_process(own: Identity, running: Status | None) -> Finding:
    if running is None:
        return Finding(True, f"process: not running; pdsl {__version__}, protocol {PROTOCOL}")
    at = f"round {running.round} of {running.rounds}, {running.doing}"
    return Finding(True, f"process: running, {at}; pdsl {__version__}, protocol {PROTOCOL}")


def _check_data(own: Identity, plan: TrainingPlan, running: bool) -> list[Finding]:
    """Check the private and public files as a run would, and the space on the disk."""
    need = MIN_FREE
    found = []
    if running:
        found.append(Finding(True, "data: in use by the running peer"))
    else:
        try:
            network = build_network(plan, load_data(own, plan)[2].y, own.folder)
            need += CHECKPOINT_VECTORS * 4 * network.num_parameters
            found.append(Finding(True, "data: the files are readable and match the plan"))
        except PdslError as e:
            found.append(Finding(False, f"data: {e}"))
    free = shutil.disk_usage(own.folder).free
    advice = "" if free >= need else f"; a run needs {need / 1e6:,.0f} MB: free some space"
    return [*found, Finding(free >= need, f"disk: {free / 1e6:,.0f} MB free{advice}")]


def _check_sync(folder: Path) -> Finding:
    """Write and sync a file in the folder, and remove it."""
    place = folder / RUN if (folder / RUN).is_dir() else folder
    start = time.monotonic()
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor-") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as e:
        return Finding(False, f"disk: cannot write and sync in {place}: {e.strerror}; mount it writable")
    took = time.monotonic() - start
    text = f"disk: writing and syncing takes {1000 * took:.0f} ms"
    return Finding(took < SLOW_SYNC, text if took < SLOW_SYNC else f"{text}; use a local disk: each round waits for it")


def _check_certificates(own: Identity, plan: TrainingPlan) -> list[Finding]:
    """Dates of all certificates. TLS between peers ignores them, but other tools do not."""
    now, found = datetime.datetime.now(datetime.UTC), []
    trust_store = TrustStore(own.folder / PINS)
    pems = {own.card.name: [own.card.certificate]}
    for j in plan.neighbours(plan.agent(own.card.name)):
        name = plan.members[j].name
        try:
            pems[name] = trust_store.certificates(name)
        except PdslError as e:
            found.append(Finding(False, f"certificate: {e}"))
    for name, certificates in pems.items():
        for pem in certificates:
            until = x509.load_pem_x509_certificate(pem.encode()).not_valid_after_utc
            if until - now < datetime.timedelta(days=EXPIRY_DAYS):
                text = f"certificate of {name}: valid until {until:%Y-%m-%d}; peers ignore this, other tools may not"
                found.append(Finding(False, text))
    return found or [Finding(True, f"certificates: {sum(map(len, pems.values()))}, and none expires soon")]


def _check_port(listen: str) -> Finding:
    """Try to listen, as a run would."""
    if listen == NO_ADDRESS:
        return Finding(True, "port: none, because this organisation opens all connections")
    host, _, port = listen.rpartition(":")
    kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
    try:
        for family, _, _, _, address in socket.getaddrinfo(host.strip("[]") or None, int(port), type=kind, flags=flags):
            socket.create_server(address[:2], family=family).close()
    except OSError as e:
        advice = (
            "end the program that uses it"
            if e.errno == errno.EADDRINUSE
            else "give an address of this machine with --listen"
        )
        return Finding(False, f"port: cannot listen on {listen} ({e.strerror}); {advice}")
    return Finding(True, f"port: {listen} is free")


def _check_caller(name: str, running: Status | None, silence: float) -> Finding:
    """A neighbour without an address: only the running peer knows whether it calls."""
    if running is None:
        return Finding(True, f"{name}: has no address and calls you; check again while pdsl peer run is active")
    seen = next((n for n in running.neighbours if n.name == name), None)
    if seen is None or seen.heard_seconds_ago > silence:
        return Finding(False, f"{name}: has no address and does not call you; start it there, or open your port to it")
    return Finding(True, f"{name}: has no address and calls you, last {seen.heard_seconds_ago:g} s ago")


def _check_contact(own: Identity, plan: TrainingPlan, contact: Contact, running: Status | None) -> list[Finding]:
    """Lines about a member that can be called."""
    about = contact.about
    if about is None:
        return [Finding(False, f"{contact.problem} (tried {contact.route})")]
    found = [Finding(True, f"answers {contact.route} in {1000 * contact.seconds:.0f} ms, with its pinned certificate")]
    version = f"pdsl {about.pdsl}, protocol {about.protocol}"
    if about.protocol != PROTOCOL:
        text = f"{version}, but {PROTOCOL} here (pdsl {__version__}); install the same version on both sides"
        return [*found, Finding(False, text)]
    if not plan.accepts(about.plan, about.round):
        text = (
            f"has another plan, {format_hash(about.plan)}, not {format_hash(plan.hash)}; agree on one and join it, or"
            " apply the amendments that one of you lacks: pdsl peer amend"
        )
        found.append(Finding(False, text))
    else:
        found.append(Finding(True, f"{version}, the same plan, round {about.round}"))
    if abs(contact.clock) > MAX_CLOCK_DIFFERENCE:
        way = "ahead of" if contact.clock > 0 else "behind"
        text = f"its clock is {abs(contact.clock):.0f} s {way} yours, which only affects logs; set both by NTP"
        found.append(Finding(False, text))
    if running is not None and not about.reaches_you and own.card.address != NO_ADDRESS:
        found.append(Finding(False, f"cannot reach you at {own.card.address}; open that port to it"))
    return found


def _check_ledger(own: Identity, plan: TrainingPlan, contacts: dict[int, Contact | None]) -> Finding:
    """Compare the ledger with the neighbours' receipts. It is read last, because a running peer charges first."""
    receipts = Receipts(own.key, plan.original_hash, [], own.folder / RUN / RECEIPTS)
    for j, contact in contacts.items():
        if contact is not None and contact.about is not None:
            receipts.check(j, contact.about.served)
    try:
        marker = check_charge_marker(own, plan)
    except PdslError as e:
        return Finding(False, f"ledger: {e}")
    charges = []
    with suppress(OSError, ValueError, KeyError, TypeError):
        charges = [int(t) for t, *_ in json.loads((own.folder / RUN / LEDGER).read_bytes())["charges"]]
    last = max(charges, default=0)
    if marker is not None and marker.round > last:
        charged = f"{own.folder / CHARGE_MARKER} has a charge for round {marker.round}"
        return Finding(False, f"ledger: missing or outdated, because {charged}; restore the newest ledger")
    if receipts.proven_round > last or receipts.proven_charges > len(charges):
        text = f"older copy: neighbours have proof of messages of round {receipts.proven_round}, and it ends at {last}"
        return Finding(False, f"ledger: {text}; restore the newest copy, or run: pdsl peer recover {own.folder}")
    return Finding(True, f"ledger: {len(charges)} charges, the last for round {last}")
