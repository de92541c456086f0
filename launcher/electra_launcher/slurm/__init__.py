"""Runs under Slurm: submit jobs, write their batch script, decide what follows each job, and read Slurm's queue."""
