"""Attempts (starts of a job's ranks): ends of ranks, the decision to requeue, and the ledger."""
