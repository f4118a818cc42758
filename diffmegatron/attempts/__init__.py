"""Attempts (starts of a job's ranks): how the ranks ended, and whether the job restarts them."""
