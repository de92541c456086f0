"""Runs under Slurm: submission, the batch script and its bookkeeping, and the view of the queue."""
