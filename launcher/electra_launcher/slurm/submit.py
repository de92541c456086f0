"""Submit runs to Slurm: check each one, write its batch script and config into RUN/slurm/, and pass it to sbatch.

    electra-dist submit --config configs/large_25pct_mask.yaml --nodes 8 --gpus-per-node 8 --time 24:00:00 --chain 5
    electra-dist submit --config configs/large_25pct_mask.yaml --nodes 8 --dry-run

Guarantee: jobs run with the config that was checked. It is resolved at submission and stored beside the script, so a
later edit of the YAML file changes nothing for waiting jobs. Of a sweep (one run for each value of a config key), all
runs are checked before the first one is submitted. Scripts are numbered and never overwritten. Nodes with a strike (a
recorded fault that has not expired) are excluded. Imports no torch.

Limits: it does not wait for the job; `electra-dist status RUN` shows how the run is doing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import itertools
import os
import re
import shlex
import statistics
import sys
import sysconfig
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from electra_dist.config import Config
from electra_dist.config.load import dump_yaml, load_config
from electra_dist.config.rules import check_new_run
from electra_dist.config.secrets import without_secret_arguments
from electra_dist.errors import UserError
from electra_dist.run.failures import excluded_nodes, read_strikes
from electra_dist.run.folder import SLURM_DIR, check_numerics, is_run_folder
from electra_dist.run.ledger import LedgerEvent, append_job, read_ledger
from electra_dist.store.atomic_files import PRIVATE, PRIVATE_PROGRAM, replacing
from electra_dist.store.open_store import absolute_location, without_tilde
from electra_launcher.slurm.batch_script import JobOptions, Submission, batch_script
from electra_launcher.slurm.slurm import run_sbatch

OWN_PACKAGES = ("electra_dist", "electra_launcher", "electra_kernels")
ASSUMED_START_S = 30  # seconds that a start and a save take together, if the run has measured no start yet
# The formats in `man sbatch`: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S, and two words that mean no limit.
_TIME_LIMIT = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)


def check(
    config_file: Path,
    overrides: Sequence[str],
    each: Sequence[str],
    options: JobOptions,
    arguments: Sequence[str],
) -> list[Submission]:
    """Check the runs that a user wants to submit: one run, or those of the sweep `each`. Nothing is written.

    `arguments` is the command line as the user typed it, for the first comment of each script. Raises OtherNumerics if
    a version with other random draws or rounding began a run, unless `options.accept_new_numerics` is set.
    """
    run_dir = load_config(config_file, tuple(overrides)).run_dir
    submissions = []
    for changes in sweep(run_dir, each):
        config = with_absolute_paths(load_config(config_file, (*overrides, *changes)))
        command = shlex.join(without_secret_arguments(command_of_run(arguments, changes)))
        submissions.append(_check_run(config, options, command))
    if not options.stage_environment:
        return submissions
    # All runs of a sweep unpack one archive, which lies in the folder of the first one.
    archive = Path(submissions[0].config.run_dir, SLURM_DIR, archive_name(environment_files()))
    return [dataclasses.replace(run, environment_archive=str(archive)) for run in submissions]


def _check_run(config: Config, options: JobOptions, command: str) -> Submission:
    """Check that a run can be submitted; return what its batch script is made from, except the packed environment."""
    check_time_limit(options.time_limit)
    check_ranks(config, options.num_nodes, options.ranks_per_node)
    run_dir = Path(config.run_dir)
    ledger = read_ledger(run_dir)
    check_job_length(options.time_limit, options.signal_ahead_s, ledger)
    if any(event.event == "done" for event in ledger):
        export = f"electra-dist export {shlex.quote(config.run_dir)}"
        raise UserError(f"run {config.run_dir} is finished; run `{export}`, or set another run_dir")
    if not is_run_folder(run_dir):
        check_new_run(config)
    check_numerics(run_dir, config.numerics, options.accept_new_numerics)
    if options.setup_file is not None:
        options = dataclasses.replace(options, setup_file=_readable_file(options.setup_file))
    if options.stage_environment and options.container is not None:
        raise UserError(
            "--stage-environment copies this interpreter's packages, but --container has its own; leave out one"
        )
    expires_s = 3600 * config.cluster.strike_expires_h
    return Submission(
        options=options,
        config=config,
        command=command,
        number=_next_number(run_dir),
        python="python" if options.container else sys.executable,
        excluded_nodes=tuple(excluded_nodes(read_strikes(run_dir), time.time(), expires_s=expires_s)),
    )


def submit(submission: Submission) -> list[str]:
    """Write the batch script and the config, submit the jobs, record them in jobs.jsonl, and return their ids.

    If no chain is asked for, two jobs are submitted. The second is the standby job: it waits until the first job has
    ended, and continues the run if the first job could not be requeued. When the run is finished, the first job
    cancels the standby job. If Slurm refuses a job, the jobs that it accepted before stay in the queue and are
    recorded.
    """
    script = submission.script_file
    script_text = batch_script(submission)
    with replacing(submission.config_file, only_new=True, permissions=PRIVATE) as file:
        file.write(dump_yaml(submission.config).encode())
    with replacing(script, permissions=PRIVATE_PROGRAM) as file:
        file.write(os.fsencode(script_text))
    if submission.environment_archive and not os.path.exists(submission.environment_archive):
        write_archive(Path(submission.environment_archive), environment_files())
    num_jobs = submission.options.chain or 2  # Without a chain, `chain` is 0: one job and its standby job.
    jobs: list[str] = []
    try:
        for _ in range(num_jobs):
            jobs.append(run_sbatch(script))
    finally:
        if jobs:
            run_dir = Path(submission.config.run_dir)
            append_job(run_dir, "submit", jobs=jobs, script=script.name, nodes=submission.options.num_nodes)
    return jobs


def with_absolute_paths(config: Config) -> Config:
    """Return a config in which the paths of the run folder, corpora, cache and checkpoint targets are absolute.

    Slurm may start a job in another folder than this process's working folder, for example in /tmp on a node that has
    no such folder. With a relative path, the job would begin a new run there. URLs are not changed. Neither are
    `train.init_from` and `train.init_generator_from`: with other values of these, the run would count as another run.
    """
    phases = tuple(
        phase.model_copy(update={"corpus": absolute_location(phase.corpus)}) for phase in config.data.phases
    )
    data = config.data.model_copy(
        update={
            "corpus": absolute_location(config.data.corpus),
            "heldout": config.data.heldout and absolute_location(config.data.heldout),
            "cache_dir": config.data.cache_dir and absolute_location(config.data.cache_dir),
            "phases": phases,
        }
    )
    targets = tuple(absolute_location(target) for target in config.checkpoint.targets)
    checkpoint = config.checkpoint.model_copy(update={"targets": targets})
    return config.model_copy(
        update={"run_dir": absolute_location(config.run_dir), "data": data, "checkpoint": checkpoint}
    )


def _readable_file(name: str) -> str:
    """Return the absolute path of the file passed with --setup; raise UserError if it cannot be read."""
    path = without_tilde(name).absolute()
    if not (path.is_file() and os.access(path, os.R_OK)):
        raise UserError(f"--setup {name}: no readable file; give the path of a shell file that every node can read")
    return str(path)


def check_ranks(config: Config, num_nodes: int, ranks_per_node: int) -> None:
    """Raise a UserError if this number of ranks cannot share `train.global_batch` evenly.

    The error lists numbers of nodes that work. The check is made at submission, not after hours in the queue.
    """
    train = config.train
    if train.fitting_micro_batch(num_nodes * ranks_per_node):
        return
    fitting_nodes = [str(nodes) for nodes in range(1, 1025) if train.fitting_micro_batch(nodes * ranks_per_node)]
    advice = "use fewer ranks per node"
    if fitting_nodes:
        advice = f"use {', '.join(fitting_nodes)} nodes"
    raise UserError(
        f"--nodes {num_nodes} x {ranks_per_node} ranks do not share train.global_batch {train.global_batch} "
        f"evenly; {advice}, or change train.global_batch"
    )


def _next_number(run_dir: Path) -> int:
    """Return the number of the run's next submission, from the names of files such as submission-0007.yaml."""
    config_files = (run_dir / SLURM_DIR).glob("submission-[0-9]*.yaml")
    names = [re.fullmatch(r"submission-(\d+)\.yaml", file.name) for file in config_files]
    return max((int(name[1]) for name in names if name is not None), default=0) + 1


# Time limits


def check_time_limit(time_limit: str | None) -> None:
    """Raise UserError unless a time limit has a format of sbatch's --time; None, the partition's limit, passes."""
    if time_limit is None or _TIME_LIMIT.fullmatch(time_limit):
        return
    raise UserError(
        f"--time {time_limit}: not a time limit of Slurm; write MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS, for "
        f"example --time 24:00:00"
    )


def check_job_length(time_limit: str | None, signal_ahead_s: int, ledger: Sequence[LedgerEvent]) -> None:
    """Raise a UserError if a job has no time to train between its start and the signal that tells it to save and end.

    Slurm sends the signal `signal_ahead_s` seconds before the time limit. The seconds of a start and a save are the
    medians in the ledger, or 30 s if no start is recorded. A time limit of None (the partition's, unknown) passes.
    """
    limit_s = _seconds_of(time_limit)
    measured_s = _measured_start_s(ledger)
    start_and_save_s = ASSUMED_START_S if measured_s is None else measured_s
    needed_s = signal_ahead_s + start_and_save_s
    if limit_s is None or limit_s > needed_s:
        return
    source = "is assumed for" if measured_s is None else "this run has needed"
    raise UserError(
        f"--time {time_limit}: {limit_s} s are not longer than --signal-ahead {signal_ahead_s} and the "
        f"{start_and_save_s:.0f} s that {source} a start and a save, so a job would make no step; set --time "
        f"to more than {needed_s / 60:.0f} minutes, or a lower --signal-ahead"
    )


def _measured_start_s(ledger: Sequence[LedgerEvent]) -> float | None:
    """Return the seconds that a start and a save of this run take, as medians; None if no start is recorded."""
    starts_s = [sum(event.setup_s.values()) for event in ledger if event.setup_s]
    saves_s = [event.stall_s + event.write_s for event in ledger if event.event == "checkpoint"]
    if not starts_s:
        return None
    median_save_s = statistics.median(saves_s) if saves_s else 0.0
    return statistics.median(starts_s) + median_save_s


def _seconds_of(time_limit: str | None) -> int | None:
    """Convert a time limit of sbatch's --time to seconds; None for no limit (None, UNLIMITED or INFINITE)."""
    if time_limit is None or not time_limit[0].isdigit():
        return None
    days, has_days, rest = time_limit.rpartition("-")
    numbers = [int(number) for number in rest.split(":")]
    if has_days:
        hours, minutes, seconds = (numbers + [0, 0])[:3]
        return 86400 * int(days) + 3600 * hours + 60 * minutes + seconds
    if len(numbers) == 3:
        hours, minutes, seconds = numbers
        return 3600 * hours + 60 * minutes + seconds
    minutes, seconds = (numbers + [0])[:2]
    return 60 * minutes + seconds


# Sweeps


def sweep(run_dir: str, each: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the config overrides of each run of a sweep: one run for each combination of values in `each`.

    `each` holds texts `KEY=VALUE,VALUE,...`. The last override of a run sets its own `run_dir`, such as runs/a-seed-1:
    the given folder, followed by the last word of each key and the value. An empty `each` gives one run without
    overrides, [()]. A UserError means that a text has another format, its key is `run_dir`, or two runs would have the
    same folder.
    """
    if not each:
        return [()]
    settings_of_options = [_parse_option(option) for option in each]
    runs = []
    for combination in itertools.product(*settings_of_options):
        folder = run_dir
        for key, value in combination:
            last_word = key.rpartition(".")[2]
            folder += f"-{last_word}-{re.sub(r'[^A-Za-z0-9._-]+', '-', value)}"
        overrides = [f"{key}={value}" for key, value in combination]
        runs.append((*overrides, f"run_dir={folder}"))
    folders = [run[-1] for run in runs]
    if len(set(folders)) < len(folders):
        raise UserError(f"--each {' --each '.join(each)}: two runs would have the same folder; name each value once")
    return runs


def command_of_run(arguments: Sequence[str], changes: Sequence[str]) -> list[str]:
    """Return the arguments of `electra-dist submit` for one run of a sweep, which has the overrides `changes`.

    They are `arguments` without the options `--each`, followed by `--set` with each override.
    """
    kept = []
    is_value_of_each = False
    for argument in arguments:
        if is_value_of_each:
            is_value_of_each = False
        elif argument == "--each":
            is_value_of_each = True
        elif not argument.startswith("--each="):
            kept.append(argument)
    for change in changes:
        kept += ["--set", change]
    return kept


def _parse_option(option: str) -> list[tuple[str, str]]:
    """Split an option KEY=VALUE,VALUE,... into one pair (KEY, VALUE) for each value."""
    key, _, values = option.partition("=")
    words = [value.strip() for value in values.split(",")]
    if not key or key == "run_dir" or not all(words):
        raise UserError(
            f"--each {option}: write KEY=VALUE,VALUE,... with a key of the config other than run_dir, for example "
            f"--each seed=1,2,3"
        )
    return [(key, word) for word in words]


# The archive of the Python packages, which job.sh unpacks on each node's own disk before the ranks start. A thousand
# ranks that import torch and DeepSpeed from a shared file system open some ten thousand files each; a node reads one
# archive. The unpacked folder, which comes first in PYTHONPATH, gets its final name only when it is complete; if that
# fails, the ranks import from the shared file system. The interpreter and its standard library are not copied.


class PackedFile(NamedTuple):
    """File of an installed Python package, to be packed into the archive that every node unpacks."""

    path: Path  # where it is on this machine
    name: str  # its path in the archive, relative to the folder that will be in PYTHONPATH


def environment_files(
    folders: Sequence[Path] | None = None, packages: Sequence[str] = OWN_PACKAGES
) -> list[PackedFile]:
    """Return all files of this interpreter's installed packages, sorted by their paths in the archive.

    The result has all files in `folders` (None: where pip installs), and the files of `packages`, which may lie
    elsewhere, as after `pip install --editable`. If two files have the same path in the archive, the one of
    `packages` is taken. A package that is not installed is left out.
    """
    if folders is None:
        folders = [Path(path) for path in sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})]
    file_of_name: dict[str, PackedFile] = {}
    for folder in folders:
        for packed in _files_below(folder, folder):
            file_of_name[packed.name] = packed
    for package in packages:
        for folder in _package_folders(package):
            for packed in _files_below(folder, folder.parent):
                file_of_name[packed.name] = packed
    return [file_of_name[name] for name in sorted(file_of_name)]


def archive_name(files: Sequence[PackedFile]) -> str:
    """Return the file name of the archive of `files`; it changes when a file's size or modification time changes."""
    digest = hashlib.sha256()
    for packed in files:
        status = packed.path.stat()
        digest.update(f"{packed.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(errors="surrogateescape"))
    return f"environment-{digest.hexdigest()[:16]}.tar"


def write_archive(file: Path, files: Sequence[PackedFile]) -> None:
    """Pack `files` into the archive `file` by an atomic replacement; do nothing if the archive exists.

    The archive's name must come from `archive_name`, which differs for other files: so an existing one has this
    content.
    """
    if file.exists():
        return
    with replacing(file) as out, tarfile.open(fileobj=out, mode="w") as archive:
        for packed in files:
            archive.add(packed.path, packed.name, recursive=False)


def _package_folders(package: str) -> list[Path]:
    """Return the folders, usually one, from which `import` loads a package; [] if it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return []
    return [Path(location) for location in spec.submodule_search_locations or ()]


def _files_below(folder: Path, root: Path) -> Iterator[PackedFile]:
    """Yield the regular files below `folder`; their paths in the archive are relative to `root`."""
    for path in folder.rglob("*"):
        if path.is_file():
            yield PackedFile(path, path.relative_to(root).as_posix())
