"""What `deepspeed` starts on every rank: parse, check, run, and end with a meaningful exit code.

deepspeed launcher/pretrain.py --config configs/large_25pct_mask.yaml
deepspeed launcher/pretrain.py --config configs/large_25pct_mask.yaml --dry-run
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from electra_dist.config_file import load_config
from electra_dist.errors import EXIT_DONE, EXIT_USER_ERROR, UserError


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
        from electra_dist.train.pretrain import run  # torch and deepspeed load only when there is something to run

        return run(config)
    except UserError as error:
        if is_first:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pretrain.py", description="Pretrain ELECTRA under DeepSpeed.")
    parser.add_argument("--config", required=True, help="YAML file, for example configs/large_25pct_mask.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override, may repeat")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved plan and touch nothing")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # deepspeed inserts it
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
