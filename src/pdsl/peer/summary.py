"""A plan in words, for members who decide whether to join: what is trained, how, and with which guarantees."""

from pathlib import Path

from pdsl.models.architecture import Trace
from pdsl.peer.experiment import build_network, public_sha256
from pdsl.peer.identity import PUBLIC, WEIGHTS, Identity
from pdsl.peer.model_check import split_at_features
from pdsl.peer.plan import TrainingPlan, file_sha256
from pdsl.peer.source_check import source_folder
from pdsl.utils.errors import PdslError

MAX_LINES = 40  # of the model; the middle of a longer one is left out


def describe_plan(plan: TrainingPlan) -> list[str]:
    """Author, model, task, training and privacy of a plan, one fact per line."""
    return [
        f"author {plan.author or 'not named'} (nothing proves it)",
        *_describe_model(plan),
        *_describe_code(plan),
        *_describe_task(plan),
        *_describe_training(plan),
        *_warnings(plan),
    ]


def _describe_model(plan: TrainingPlan) -> list[str]:
    model, network = plan.config.model, build_network(plan)
    frozen = sum(p.numel() for p in network.module.parameters()) - network.num_parameters
    traces = [] if model.layers is None else split_at_features(plan.config, plan.task.shape, plan.task.public_records)
    frozen += sum(trace.frozen for trace in traces[:-1])
    weights = "" if model.weights_sha256 is None else f", weights {model.weights_sha256}"
    head = f"model {model.name}: {network.num_parameters:,} parameters trained, {frozen:,} frozen{weights}"
    lines = [line for trace in traces for line in _describe_layers(trace)]
    if len(lines) > MAX_LINES:
        half = MAX_LINES // 2
        lines = [*lines[:half], f"  … {len(lines) - 2 * half} more layers …", *lines[-half:]]
    return [head, *lines]


def _describe_layers(trace: Trace) -> list[str]:
    def counts(trained: int, frozen: int) -> str:
        return f", {trained:,} trained" if trained else f", {frozen:,} frozen" if frozen else ""

    return [
        f"  {'  ' * layer.depth}{layer.text} → {layer.output}{counts(layer.trained, layer.frozen)}"
        for layer in trace.layers
    ]


def _describe_code(plan: TrainingPlan) -> list[str]:
    return [
        f"installed code {path} in {source_folder(path)}, SHA-256 {digest}" for path, digest in plan.sources.items()
    ]


def _describe_task(plan: TrainingPlan) -> list[str]:
    task, settings, public = plan.task, plan.config.task, plan.config.public
    targets = "numbers" if task.targets == "numbers" else f"{task.classes} {task.targets}"
    loss = settings.loss or {"regression": "squared error" if settings.huber is None else "Huber's loss"}.get(
        plan.task_kind, "cross-entropy"
    )
    return [
        f"task {plan.task_kind}: {targets} from records of shape {task.shape}, loss {loss}",
        f"public set of {task.public_records:,} records: features {public.features}, start {public.start},"
        f" inputs {'standardised by it' if task.scale == 'public' else 'as they are'}",
    ]


def _describe_training(plan: TrainingPlan) -> list[str]:
    config, privacy, batch, timeouts = plan.config, plan.config.privacy, plan.config.batch, plan.timeouts
    rate = batch.rate or min(1.0, batch.size / (batch.records or plan.task.records))
    return [
        f"{config.algorithm.name}, {config.rounds} rounds, learning rate {config.algorithm.learning_rate}, batches of"
        f" {rate * plan.task.records:,.0f} of {plan.task.records:,.0f} records (rate {rate:.4g})",
        f"privacy: total ε {privacy.budget} at δ {privacy.delta}, clipping {privacy.clipping} at norm"
        f" {privacy.max_grad_norm:g}",
        f"timeouts in seconds: silence {timeouts.silence:g}, patience {timeouts.patience:g}, deadline"
        f" {timeouts.deadline:g}, start {timeouts.start:g}; quorum {timeouts.quorum}",
    ]


def _warnings(plan: TrainingPlan) -> list[str]:
    delta, records = plan.config.privacy.delta, plan.task.records
    if delta < 1 / records:
        return []
    return [
        f"WARNING: δ {delta:g} is at least 1/records ({1 / records:.2g}): publishing one record as"
        " it is would satisfy it; ask for a smaller privacy.delta"
    ]


def check_files(own: Identity, plan: TrainingPlan) -> list[str]:
    """Files that the folder still lacks, one line each; PdslError if one is there with other content."""
    needed = {PUBLIC: plan.task.public, WEIGHTS: plan.config.model.weights_sha256}
    lines = []
    for name, digest in needed.items():
        path = own.folder / name
        if digest is not None and not path.exists():
            lines.append(f"missing: copy {name} (SHA-256 {digest}) to {own.folder}")
        elif digest is not None and _sha256(path) != digest:
            raise PdslError(f"{path} is not the file of this plan: its SHA-256 is not {digest}; request it again")
    return lines


def _sha256(path: Path) -> str:
    return public_sha256(path) if path.name == PUBLIC else file_sha256(path, "copy the weights of the plan there")
