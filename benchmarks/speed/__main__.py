"""Print the speed table: python -m benchmarks.speed [--repeats N] [--json]."""

import argparse
import json
import sys

from rich.console import Console

from benchmarks.speed.measure import measure
from benchmarks.speed.table import table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each ratio; medians are printed")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args()
    measured = measure(chosen.repeats, lambda what: print(f"measuring {what}", file=sys.stderr))
    if chosen.json:
        print(json.dumps(measured))
    else:
        Console().print(table(measured))


if __name__ == "__main__":
    main()
