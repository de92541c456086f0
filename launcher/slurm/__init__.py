"""Slurm: submission, the batch script and its bookkeeping, the queue."""
