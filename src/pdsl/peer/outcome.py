"""What a run leaves to its organisation: its own model, a summary and a page."""

import json
from typing import Any

from safetensors.torch import save
from torch import Tensor

from pdsl.peer.account import Account
from pdsl.privacy.statement import statement
from pdsl.report import write_report
from pdsl.runs import Row, RunDirectory
from pdsl.train import Experiment, final_evaluation, finite


def finish(
    directory: RunDirectory, e: Experiment, x: Tensor, rows: list[Row], account: Account, facts: dict[str, Any]
) -> dict[str, Any]:
    """Write model, summary and page for the model x [1, d]. Returns the summary, `facts` first."""
    evaluation = final_evaluation(e, x)
    module = e.network.to_module(x[0])
    # cloned, since a file does not hold one tensor under two names, as tied layers do
    named = {name: tensor.clone().contiguous() for name, tensor in module.state_dict().items()}
    directory.write("model.safetensors", save(named))
    run = [row for row in rows if "absent" not in row]
    summary = {
        **facts,
        "accuracy": evaluation.accuracy,
        "accuracy_of_mean": evaluation.accuracy_of_mean,
        "accuracy_per_agent": evaluation.accuracies,
        "loss": evaluation.loss,
        "rounds": len(rows),
        "rounds_run": len(run),
        "neighbour_rounds_lost": sum(len(row.get("lost", ())) for row in run),
        "epsilon": finite(account.epsilon),
        "delta": account.delta,
        "budget": account.budget,
        "privacy": statement(e.config.privacy, account.as_ledger(), [account.mechanism]),
        "sigma": max(account.mechanism.sigmas),
        "messages": sum(row["messages"] for row in run),
        "bytes": sum(row["bytes"] for row in run),
        "model_sha256": evaluation.digests[0],
        "notes": [],
        "run": str(directory.path),
    }
    directory.write("summary.json", json.dumps(summary, indent=2, ensure_ascii=False).encode())
    write_report(directory.path)
    return summary
