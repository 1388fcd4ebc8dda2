"""Helpers of tests: commands, ranks, organisations, refusals, real data."""
