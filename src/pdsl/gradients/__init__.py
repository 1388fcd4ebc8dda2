"""Clipped per-record gradients: kernels (`per_example`), clipping, and the choice of a kernel (`independence`)."""
