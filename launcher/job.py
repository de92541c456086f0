"""Former name of `launcher.slurm.job`, kept for batch scripts that were queued under that name."""

import sys

from launcher.slurm.job import main

if __name__ == "__main__":
    sys.exit(main())
