"""Cards: a result in a terminal and in a notebook, and the model card README.md of a run directory.

They have settings, metrics on public records and the privacy statement, but no private records and no number of them.
"""

import hashlib
import html
from typing import TYPE_CHECKING

from pdsl.data.datasets import LOADERS
from pdsl.section import flat
from pdsl.training.experiment import Experiment
from pdsl.utils.format import format_epsilon, name_data
from pdsl.utils.versions import versions

if TYPE_CHECKING:
    from pdsl.runs.result import Result, Summary

MAX_CARD = 900  # characters of a result in a terminal
TAGS = {
    "multiclass": "classification",
    "binary": "classification",
    "multilabel": "multi-label classification",
    "regression": "regression",
    "custom": "custom loss",
}


def card_lines(result: "Result") -> dict[str, str]:
    """The card of a result: text by label."""
    s, metric = result.brief_summary, result.evaluation.metric
    lines = {
        metric: f"{result.score:.4g} (mean over {s['agents']} agents), {result.score_of_mean:.4g} (mean model), on"
        f" {_test_records(result.experiment)}",
        "task": describe_task(result.experiment),
        "run": f"{s['algorithm']} on {name_data(s['data'])}, {s['graph']}, {s['rounds']} rounds, {s['seconds']:.1f} s",
        "privacy": s["privacy"],
    }
    if s["stopped"]:
        lines["stopped"] = s["stopped"]
    if result.path is not None:
        lines["folder"] = str(result.path)
    return lines


def describe_task(e: Experiment) -> str:
    """Kind of the task, with the number of classes, labels or targets."""
    kind, outputs = e.task.kind, e.task.outputs
    text = {
        "multiclass": f"multiclass, {outputs} classes",
        "binary": "binary, one logit",
        "multilabel": f"multilabel, {outputs} labels",
        "regression": f"regression of {outputs} number{'s' * (outputs != 1)} per record",
        "custom": "custom",
    }[kind]
    return text if e.task.loss is None else f"{text}, with an own loss"


def _test_records(e: Experiment) -> str:
    n = len(e.test[1])
    return f"{n} test record{'s' * (n != 1)}"


def describe_result(result: "Result") -> str:
    """A result in a few lines."""
    lines = card_lines(result)
    width = max(map(len, lines))
    text = "\n".join(["pdsl.Result", *(f"  {label:<{width}}  {value}" for label, value in lines.items())])
    return text if len(text) <= MAX_CARD else text[: MAX_CARD - 1] + "…"


def html_card(result: "Result") -> str:
    """A result as a small table."""
    rows = "".join(
        f'<tr><th style="text-align:left">{html.escape(label)}</th><td style="text-align:left">{html.escape(value)}'
        "</td></tr>"
        for label, value in card_lines(result).items()
    )
    return f"<table>{rows}</table>"


def model_card(e: Experiment, summary: "Summary", ledger: bytes | None) -> str:
    """README.md in the format of model cards: a YAML header and text. `ledger`: content of ledger.json."""
    metric, kind = summary["metric"], e.task.kind
    scores = {name: value for name, value in summary["metrics"].items() if isinstance(value, float)}
    used = versions()
    header = [
        "---",
        "library_name: pdsl",
        "tags:",
        *(f"- {tag}" for tag in ("pdsl", "decentralized-learning", "differential-privacy", TAGS[kind])),
        *([f"datasets:\n- {e.data.name}"] if e.data.name in LOADERS else []),
        "metrics:",
        *(f"- {name}" for name in scores or [metric]),
        "---",
    ]
    measured = [f"| {name} of the mean model | {value:.4g} |" for name, value in scores.items()]
    return "\n".join(
        [
            *header,
            "",
            f"# {e.config.algorithm.name} on {name_data(e.data.name)}",
            "",
            f"Mean of the models of {e.graph.agents} agents on a graph ({e.graph.describe()}), after"
            f" {summary['rounds']} rounds of decentralised training. Task: {describe_task(e)}."
            f" {e.network.num_parameters:,} trained parameters.",
            "",
            "## Privacy",
            "",
            *_privacy(e, summary, ledger),
            "",
            f"## Metrics on {_test_records(e)}",
            "",
            "| metric | value |",
            "|---|---|",
            *measured,
            f"| {metric}, mean over agents | {_number(flat(summary).get(metric))} |",
            "",
            "## Use",
            "",
            "```python",
            "import pdsl",
            "",
            f'run = pdsl.load("."{_model_argument(e)})',
            "run.predict(x)  # raw inputs; scaling and class names are in the file",
            "```",
            "",
            "`config.toml` has every setting. `pdsl run config.toml` repeats the run, and `pdsl audit` of this folder"
            " tests its privacy statement.",
            "",
            f"Made with pdsl {used['pdsl']}, torch {used['torch']}.",
            "",
        ]
    )


def _privacy(e: Experiment, summary: "Summary", ledger: bytes | None) -> list[str]:
    if ledger is None or e.mechanisms is None:
        return [f"{summary['privacy'].capitalize()}."]
    rate = e.mechanisms[0].rate
    return [
        f"{summary['privacy']}.",
        "",
        "| | |",
        "|---|---|",
        f"| ε | {format_epsilon(summary['epsilon'])}, total of the worst agent |",
        f"| δ | {summary['delta']:g} |",
        f"| adjacency | {'a record replaced' if rate is None else 'a record added or removed'} |",
        f"| sampler | {'fixed batches' if rate is None else f'Poisson, rate {rate:.4g}'} |",
        "| adversary | all neighbours of an agent colluding, who see every message; and the final models |",
        f"| randomness | {e.config.privacy.randomness} |",
        f"| SHA-256 of ledger.json | {hashlib.sha256(ledger).hexdigest()} |",
    ]


def _model_argument(e: Experiment) -> str:
    return f", model={type(e.network.module).__name__}(...)" if e.config.model.name == "python" else ""


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "not finite"
