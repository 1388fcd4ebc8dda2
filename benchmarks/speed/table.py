"""The ratios as a table for people, with what each is about."""

from typing import Any

from rich.table import Table

ROWS = {
    "round_vs_literal.full20-fast": "PDSL round, full graph of 20, R = 20, fast: times faster than literally",
    "round_vs_literal.full20-montecarlo": "the same with true coalition models (montecarlo)",
    "round_vs_literal.ring10-exact": "PDSL round, ring of 10, exact: times faster than literally",
    "round_vs_literal_on_all_cores.full20-fast": "full graph, fast; the literal algorithm with a torch thread per core",
    "round_vs_literal_on_all_cores.full20-montecarlo": "full graph, montecarlo; likewise",
    "round_vs_literal_on_all_cores.ring10-exact": "ring, exact; likewise",
    "peak_fraction.forward": "forward pass: share of the machine's matrix-product peak, one thread",
    "peak_fraction.gradient": "gradient, every record clipped: the same",
    "two_cores": "PDSL round, ring of 10: one worker over one per core",
    "growth": "time per agent and round: ring of 1,000 over ring of 10",
    "per_sample_vs_batch_clipping": "gradient: every record clipped over the batch clipped",
    "help_vs_torch": "pdsl --help over import torch",
    "system_vs_seeded_noise": "noise of one message: system entropy over seeded",
}


def table(measured: dict[str, Any]) -> Table:
    shown = Table("what", "ratio", header_style="bold")
    for key, what in ROWS.items():
        value: Any = measured
        for part in key.split(".", 1):
            value = value[part]
        shown.add_row(what, f"{value:.3g}")
    return shown
