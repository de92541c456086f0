"""Entry point of batch scripts that were queued before the package `launcher.slurm` existed."""

import sys

from launcher.slurm.job import main

if __name__ == "__main__":
    sys.exit(main())
