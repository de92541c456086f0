"""Run pretraining on one rank: what every process does that `deepspeed` or the supervisor starts for a rank.

deepspeed --module electra_launcher.pretrain --config CONFIG     as `deepspeed launcher/pretrain.py` in the repository
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from electra_dist.config.rules import check_new_run
from electra_dist.config.secrets import whole_overrides, without_secret_arguments
from electra_dist.engine.rank_environment import rank_place
from electra_dist.errors import EXIT_DONE, EXIT_USER_ERROR, NodeError, StorageLost, UserError, error_line
from electra_dist.escapes import printable
from electra_dist.run.environment_record import check_deepspeed, check_gpus
from electra_dist.run.folder import is_run_folder
from electra_launcher.entry import add_options, begin_program, end_process_with, exit_code_of, read_config


def main(argv: Sequence[str] | None = None) -> int:
    """Train on this rank, or print the plan with `--dry-run`; return an exit code of `electra_dist/errors.py`.

    An error that the user must fix is printed as one line. It is printed by rank 0; by the first rank of a node if
    only that node has the error; or, once the process group exists, by the first rank that meets the error. A rank
    with unusable environment variables prints that, too. Any other exception is raised, and the exit code is 1.
    """
    args = _parse(argv)
    overrides = whole_overrides(args.set)
    # Every record of the command line is made from sys.argv, also those of tracking services.
    sys.argv[1:] = without_secret_arguments(sys.argv[1:])
    try:
        is_first_rank = rank_place().rank == 0
    except UserError as error:
        # Each rank prints what is wrong with its own variables: the other ranks may be sound and wait for it.
        print(error_line(error), file=sys.stderr, flush=True)
        return EXIT_USER_ERROR

    is_first_on_node = os.environ.get("LOCAL_RANK", "0") == "0"
    # The first Ctrl-C, before the run has installed its handlers, or the second one, which skips the checkpoint.
    interrupted = "interrupted; the next start goes on from the newest checkpoint"
    return exit_code_of(
        lambda: _pretrain(args, overrides, is_first_rank),
        shows=lambda error: is_first_rank or (isinstance(error, NodeError) and is_first_on_node),
        interrupted=interrupted if is_first_rank else "",
    )


def _pretrain(args: argparse.Namespace, overrides: Sequence[str], is_first_rank: bool) -> int:
    """Train on this rank and return the exit code; at the end, rank 0 writes report.html.

    If an input was refused, no report is written: the folder may be another run's. With `--dry-run`, the first rank
    prints the plan instead.
    """
    config, patience = read_config(args.config, overrides)
    run_dir = Path(config.run_dir)
    if not is_run_folder(run_dir, patience=None if args.dry_run else patience):
        check_new_run(config)
    if args.dry_run:
        if is_first_rank:
            # Imported only for a dry run, so that training starts sooner.
            from electra_dist.planning.plan import make_plan
            from electra_dist.planning.plan_page import print_plan

            print_plan(make_plan(config))
        return EXIT_DONE
    check_deepspeed()
    check_gpus()
    # Imported late, because a dry run needs neither torch nor deepspeed, which take seconds to import. DeepSpeed's
    # autotuner, which no run uses, would import MLflow where it is installed; that takes as long as torch.
    with hidden("mlflow"):
        from electra_dist.train.run import run

    has_begun = True
    try:
        return run(config, args.accept_new_numerics, args.from_scratch)
    except (UserError, StorageLost):
        has_begun = False  # an input was refused: the folder, if it exists, may be that of another run
        raise
    finally:
        if is_first_rank and has_begun and is_run_folder(run_dir):
            _write_report(run_dir)


@contextlib.contextmanager
def hidden(module: str) -> Iterator[None]:
    """Let imports of a module fail within a `with` block, as if it were not installed, unless it is imported already.

    The module and its parts can be imported as usual after the block.
    """
    is_imported = module in sys.modules
    if not is_imported:
        sys.modules[module] = None  # type: ignore[assignment]  # Python's way to say that there is none
    try:
        yield
    finally:
        if not is_imported:
            sys.modules.pop(module, None)


def _write_report(run_dir: Path) -> None:
    """Write report.html into the run folder. A failure only prints one line to stderr and does not affect the run."""
    try:
        # Imported here, because matplotlib takes half a second.
        from electra_dist.report.report_page import write_report

        write_report(run_dir)
    except Exception as error:  # noqa: BLE001  (the exit code must be that of the training, whatever the report does)
        message = (
            f"report.html was not written ({type(error).__name__}: {error}); the run is not affected; try again with "
            f"`electra-dist report {shlex.quote(str(run_dir))}`"
        )
        print(printable(message), file=sys.stderr, flush=True)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line `argv` of a rank; None stands for that of this process."""
    parser = argparse.ArgumentParser(prog="pretrain.py", description="Pretrain ELECTRA under DeepSpeed.")
    add_options(parser, "--config", "--set", "--accept-new-numerics")
    parser.add_argument(
        "--from-scratch",
        action="store_true",
        help="begin the run again at step 0; its checkpoints and records are renamed, and nothing is deleted",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan of the run and write nothing")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # deepspeed adds this argument
    return parser.parse_args(argv)


if __name__ == "__main__":
    begin_program()
    end_process_with(main)
