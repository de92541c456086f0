"""Check the sbatch options that a user passes on, and submit batch scripts with sbatch."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Container, Iterable, Sequence
from pathlib import Path

from electra_dist.corpus.prepare.slurm_submission import environment_of_submission
from electra_dist.errors import UserError
from electra_dist.store.regular_files import read_regular


def user_options(sbatch_options: Iterable[str], reserved: Container[str]) -> list[tuple[str, str]]:
    """Split the user's further sbatch options into pairs of name and value; a flag has the value "".

    Each option is `name=value` or `name`, with or without dashes in front, such as account=vision. A UserError means
    that a name is missing, or is one of `reserved`, the options that the script sets itself.
    """
    options = []
    for option in sbatch_options:
        name, _, value = option.lstrip("-").partition("=")
        if not name:
            raise UserError(f"--sbatch {option}: the name of an sbatch option is missing; write NAME=VALUE or NAME")
        if name in reserved:
            raise UserError(
                f"--sbatch {option}: the script sets `{name}` itself; leave it out, or use the option of "
                f"`electra-dist submit` for it"
            )
        options.append((name, value))
    return options


def run_sbatch(script: Path, options: Sequence[str] = ()) -> str:
    """Run sbatch with further `options` on a batch script, and return the job id; UserError if sbatch refuses it."""
    script_options = re.findall(r"^#SBATCH --([a-z-]+)", read_regular(script).decode("utf-8", "replace"), re.MULTILINE)
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", *options, str(script)],
            env=environment_of_submission(os.environ, script_options),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except FileNotFoundError:
        raise UserError(
            f"sbatch is not installed on this machine; run it on a login node: sbatch {shlex.quote(str(script))}"
        ) from None
    if done.returncode != 0:
        reason = " ".join(done.stderr.replace("sbatch: error:", " ").split())
        raise UserError(f"sbatch refused {script}: {reason}; change the option that it names and submit again")
    # With --parsable, sbatch prints `JOBID` or, in a federation, `JOBID;CLUSTER`.
    return done.stdout.strip().partition(";")[0]
