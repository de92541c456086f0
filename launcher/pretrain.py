"""What `deepspeed` starts on every rank: parse, check, run, and end with a meaningful exit code.

deepspeed launcher/pretrain.py --config configs/large_25pct_mask.yaml
deepspeed launcher/pretrain.py --config configs/large_25pct_mask.yaml --dry-run
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from electra_dist.config import Config
from electra_dist.config_file import load_config
from electra_dist.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from electra_dist.run.folder import is_run_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank. Returns the process's exit code (errors.py)."""
    args = _parse(argv)
    is_first = int(os.environ.get("RANK", "0")) == 0
    try:
        config = load_config(args.config, args.set)
        if args.dry_run:
            if is_first:
                from electra_dist.planning.tables import print_plan

                print_plan(config)
            return EXIT_DONE
        return _pretrain(config, is_first)
    except UserError as error:
        if is_first:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR


def _pretrain(config: Config, is_first: bool) -> int:
    """Run this rank, and have the first one write the report, however the run ended.

    Raises:
        UserError: the inputs were refused before anything was written; then no report is written either.
    """
    from electra_dist.train.pretrain import run  # torch and deepspeed load only when there is something to run

    is_refused = False
    try:
        return run(config)
    except UserError:
        is_refused = True
        raise
    finally:
        run_dir = Path(config.run_dir)
        if is_first and not is_refused and is_run_folder(run_dir):
            from electra_dist.report.page import write_report  # matplotlib: half a second that no step waits for

            write_report(run_dir)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pretrain.py", description="Pretrain ELECTRA under DeepSpeed.")
    parser.add_argument("--config", required=True, help="YAML file, for example configs/large_25pct_mask.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override, may repeat")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved plan and touch nothing")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # deepspeed inserts it
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
