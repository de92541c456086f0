"""Entry points of runs: the program of a rank, its supervisor, preflight checks, Slurm jobs and the command line."""
