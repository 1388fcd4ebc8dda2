"""Plant every fault of tests/faults/ and count those that the audit catches; count false alarms on correct runs.

    python benchmarks/audit_faults.py [--only TEXT] [--honest N] [--out TABLE.md]

Prints a table of faults (class, description, caught or MISSED, and the checks that failed), the catch rate, and the
number of false alarms in N correct runs.
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
    verdict = "caught" if by_name else "caught by other checks" if caught else "MISSED"
    found = "; ".join(name[:90].replace("|", "/") for name in caught) or "nothing"
    return f"| {fault.kind} | {fault.name} | {fault.what} | {verdict} | {fault.by} | {found} | {seconds:.1f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="only faults whose name or class contains this text")
    parser.add_argument("--honest", type=int, default=50, help="number of correct runs")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    chosen = parser.parse_args()
    lines: list[str] = []

    def say(text: str) -> None:
        lines.append(text)
        print(text, flush=True)
        if chosen.out:
            chosen.out.write_text("\n".join(lines) + "\n", encoding="utf-8")

    say("| class | fault | description | verdict | expected check | failed checks | seconds |")
    say("|---|---|---|---|---|---|---|")
    counts = {"named": 0, "any": 0, "all": 0}
    for fault in FAULTS:
        if chosen.only not in f"{fault.kind} {fault.name}":
            continue
        start = time.process_time()
        try:
            caught = examined(fault, whole=True)
        except Exception as error:  # an audit that fails to run does not count as catching the fault
            say(f"| {fault.kind} | {fault.name} | {fault.what} | ERROR | {fault.by} | {error!r} | |")
            counts["all"] += 1
            continue
        say(line(fault, time.process_time() - start, caught))
        counts["all"] += 1
        counts["any"] += bool(caught)
        counts["named"] += caught_by(fault, caught)
    say(f"\ncaught: {counts['any']} of {counts['all']}, by the expected check: {counts['named']} of {counts['all']}")

    alarms = 0
    runs = [*OTHER_HONEST, *honest_runs()][: chosen.honest]
    for values in runs:
        failed = [f for f in findings_of(values) if f.verdict is not Verdict.PASS]
        alarms += bool(failed)
        for finding in failed:
            say(f"false alarm: {values}: {finding.check}: {finding.detail}")
    say(f"correct runs: {alarms} false alarms in {len(runs)}")
    return 0 if counts["named"] == counts["all"] and not alarms else 1


if __name__ == "__main__":
    raise SystemExit(main())
