"""Many runs: `job` is one, `scheduler` runs several at once, `tuning` chooses learning rates, `comparison` compares.

`significance` tests differences over seeds, `presentation` and `page` show a comparison.
"""
