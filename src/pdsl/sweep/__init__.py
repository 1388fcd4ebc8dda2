"""Many runs: `job` is one, `scheduler` runs several at once, `tuning` chooses learning rates, `comparison` compares."""
