"""Privacy: the Gaussian mechanism on every message, and the paper's Theorem 1."""

from pdsl.privacy.mechanism import Noise, sensitivity, sigmas
from pdsl.privacy.theorem1 import theorem1_sigma

__all__ = ["Noise", "sensitivity", "sigmas", "theorem1_sigma"]
