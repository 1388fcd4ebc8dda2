"""What the audit catches: every planted fault of tests/faults.py, and honest runs without a false alarm.

    python benchmarks/audit_faults.py [--only TEXT] [--honest N] [--out TABLE.md]

Prints a table of faults (class, what it is, caught or MISSED, by which checks), the catch rate, and how many of N
honest runs were accused.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from pdsl.auditing import Verdict
from tests.faults.base import Fault, caught_by, examined, findings_of
from tests.faults.files import OTHER_HONEST, honest_runs
from tests.faults.register import FAULTS


def line(fault: Fault, seconds: float, caught: list[str]) -> str:
    by_name = caught_by(fault, caught)
    verdict = "caught" if by_name else "caught by others" if caught else "MISSED"
    found = "; ".join(name[:90].replace("|", "/") for name in caught) or "nothing"
    return f"| {fault.kind} | {fault.name} | {fault.what} | {verdict} | {fault.by} | {found} | {seconds:.1f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults whose name or class contains this")
    parser.add_argument("--honest", type=int, default=50, help="honest runs")
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    chosen = parser.parse_args()
    lines: list[str] = []

    def say(text: str) -> None:
        lines.append(text)
        print(text, flush=True)
        if chosen.out:
            chosen.out.write_text("\n".join(lines) + "\n", encoding="utf-8")

    say("| class | fault | what | verdict | must be caught by | caught by | s |")
    say("|---|---|---|---|---|---|---|")
    counts = {"named": 0, "any": 0, "all": 0}
    for fault in FAULTS:
        if chosen.only not in f"{fault.kind} {fault.name}":
            continue
        start = time.process_time()
        try:
            caught = examined(fault, whole=True)
        except Exception as error:  # a fault that breaks the audit is not caught by it
            say(f"| {fault.kind} | {fault.name} | {fault.what} | ERROR | {fault.by} | {error!r} | |")
            counts["all"] += 1
            continue
        say(line(fault, time.process_time() - start, caught))
        counts["all"] += 1
        counts["any"] += bool(caught)
        counts["named"] += caught_by(fault, caught)
    say(f"\ncaught: {counts['any']} of {counts['all']}, by the check named: {counts['named']} of {counts['all']}")

    alarms = 0
    runs = [*OTHER_HONEST, *honest_runs()][: chosen.honest]
    for values in runs:
        accused = [f for f in findings_of(values) if f.verdict is not Verdict.PASS]
        alarms += bool(accused)
        for finding in accused:
            say(f"false alarm: {values}: {finding.check}: {finding.detail}")
    say(f"honest runs: {alarms} false alarms of {len(runs)}")
    return 0 if counts["named"] == counts["all"] and not alarms else 1


if __name__ == "__main__":
    raise SystemExit(main())
