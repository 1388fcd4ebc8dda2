"""Theorem 2 and Corollary 1 of the paper, evaluated for given constants or for those of a run."""
