"""Stress tests, which `make soak` and `make fuzz` run."""
