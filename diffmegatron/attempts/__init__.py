"""Attempts (starts of a job): how each rank ended, the decision to requeue, and the ledger."""
