"""Does a round cost an agent the same among many as among few? PDSL on rings of 10 to 1,000 agents, real MNIST CNN.

    python benchmarks/growth.py docs/images/growth.svg

Each size runs ten rounds in a process of its own: median time per agent and round, and the most memory it took.
"""

import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before another package of this name

from benchmarks.speed.measure import small_ring
from pdsl.report.svg import drawing, element, path, text
from pdsl.training.trainer import rounds

SIZES = (10, 30, 100, 300, 1000)
ROUNDS = 10


def one(agents: int) -> dict[str, float]:
    e = small_ring(agents, rounds=ROUNDS, evaluate_every=1000)
    times, start = [], time.perf_counter()
    for _ in rounds(e):
        times.append(time.perf_counter() - start)
        start = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # GiB
    return {"agents": agents, "ms_per_agent": 1e3 * median(times[1:]) / agents, "gib": peak}


def picture(found: list[dict[str, float]]) -> str:
    """Time per agent over the number of agents, the latter in powers of ten."""
    top = 1.25 * max(f["ms_per_agent"] for f in found)

    def place(f: dict[str, float]) -> tuple[float, float]:
        return 60 + 200 * (math.log10(f["agents"]) - 1), 180 - 160 * f["ms_per_agent"] / top

    marks = [element("path", d=path([place(f) for f in found]), fill="none", stroke="#2563eb", stroke_width=2)]
    for f in found:
        x, y = place(f)
        marks.append(element("circle", cx=x, cy=y, r=3, fill="#2563eb"))
        marks.append(text(f"{f['ms_per_agent']:.1f} ms", x, y - 8, text_anchor="middle"))
        marks.append(text(f"{f['agents']:.0f}", x, 198, text_anchor="middle"))
    marks.append(text("agents on the ring; time per agent and round", 260, 218, text_anchor="middle"))
    label = "Time per agent and round over the number of agents"
    inside = element("g", *marks, font_family="sans-serif", font_size=12, fill="#555")
    return drawing(520, 226, label, inside, xmlns="http://www.w3.org/2000/svg")


def main() -> None:
    if sys.argv[1] == "--one":
        print(json.dumps(one(int(sys.argv[2]))))
        return
    found = []
    for agents in SIZES:
        command = [sys.executable, __file__, "--one", str(agents)]
        found.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        f = found[-1]
        print(f"{f['agents']:>5} agents: {f['ms_per_agent']:6.2f} ms per agent, {f['gib']:.2f} GiB", flush=True)
    print(f"1,000 over 10: {found[-1]['ms_per_agent'] / found[0]['ms_per_agent']:.2f} times the time per agent")
    Path(sys.argv[1]).write_text(picture(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
