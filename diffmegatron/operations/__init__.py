"""Start and watch runs: Slurm and torchrun jobs, their status, the quickstart, shipped recipes."""
