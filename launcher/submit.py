"""Former name of `electra-dist submit`, kept for scripts that call it."""

import sys

from launcher.cli.main import main

if __name__ == "__main__":
    sys.argv.insert(1, "submit")
    main()
