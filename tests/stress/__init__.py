"""Stress tests, which `make soak`, `make fuzz` and `make simulate` run."""
