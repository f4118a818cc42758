"""Attempts (starts) of a job: the ends of their ranks, the decision after them, and the ledger."""
