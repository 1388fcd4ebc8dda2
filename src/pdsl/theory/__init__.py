"""Theorem 2 and Corollary 1 of the paper as numbers, and what a run's gradients really are beside them."""
