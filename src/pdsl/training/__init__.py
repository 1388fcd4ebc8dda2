"""Training without files: prepare an experiment, run its rounds, evaluate its models."""
