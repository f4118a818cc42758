"""Attempts of a job: how the ranks ended, and whether the job restarts them."""
