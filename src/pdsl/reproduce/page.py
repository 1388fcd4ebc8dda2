"""The report of a reproduced table or figure."""

from pdsl.report.document import render
from pdsl.report.figures import Figure
from pdsl.reproduce.cells import READINGS
from pdsl.reproduce.figures import draw_panel, losses
from pdsl.reproduce.paper import AGENTS, FIGURES, GRAPHS, METHODS, Setting, panels
from pdsl.reproduce.results import Results
from pdsl.reproduce.tables import GRAPH_NAMES, blocks, caption, columns
from pdsl.utils.format import format_epsilon


def table_page(results: Results) -> str:
    return render(
        "paper_table.html.j2",
        title=results.title,
        verdict=results.verdict(),
        graphs=[GRAPH_NAMES[graph] for graph in GRAPHS],
        agents=AGENTS,
        blocks=blocks(results, columns()),
        about=caption(results),
        command=results.plan.command,
        failed=results.failed,
    )


def figure_page(results: Results) -> str:
    task = results.plan.task
    text = f"ε: the paper's value. Interpreted here as {task.reading}: {READINGS[task.reading]}."
    if task.quick:
        text += " Quick: handwritten digits and few rounds, not the paper's task."
    figures = [
        Figure(
            panel,
            f"({panel}) ε = {paper:g}; {_our_epsilon(results, agents, paper)}M = {agents}",
            "Test loss, mean over agents and seeds.",
            draw_panel(losses(results, panel)),
            missing="Not run yet.",
        )
        for panel, (agents, paper) in panels(results.target).items()
    ]
    return render(
        "paper_figure.html.j2",
        title=results.title,
        verdict=text,
        figures=figures,
        command=results.plan.command,
        failed=results.failed,
    )


def _our_epsilon(results: Results, agents: int, paper: float) -> str:
    """The total ε of our runs in a panel: the one that was set or, without one, the largest that was spent."""
    task, (table, graph) = results.plan.task, FIGURES[results.target]
    settings = [Setting(table, paper, method, graph, agents) for method in METHODS]
    if task.reading == "none":
        return "ours: noise off; "
    if task.reading == "total":
        return f"ours: total {format_epsilon(task.epsilon(settings[0]))}; "
    spent = [total for setting in settings if (total := results.entries[setting].epsilon) is not None]
    return f"ours: total {format_epsilon(max(spent))}; " if spent else ""
