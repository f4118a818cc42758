"""Operation of runs: Slurm and torchrun jobs, their status, the quickstart and the recipes."""
