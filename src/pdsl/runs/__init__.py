"""Training with files: run directory, checkpoints, runner, result, progress."""
