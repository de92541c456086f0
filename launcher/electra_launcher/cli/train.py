"""`electra-dist train`: starts or continues a run on this machine, or on the hosts of a file, under supervisors.

How: on one machine the supervisor runs in this process. On several hosts this process starts one supervisor on each by
ssh, shows the output of the first, and ends when all have ended. Ctrl-C makes the ranks save and end; a second one
ends them at once.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from electra_dist.console import Console
from electra_dist.errors import EXIT_DONE, EXIT_STOPPED, StoreAway, UserError
from electra_dist.escapes import printable
from electra_launcher.cli.command_output import open_console
from electra_launcher.cli.options import AcceptNewNumerics, Overrides

if TYPE_CHECKING:
    from electra_dist.config import Config

_SSH_FAILED = 255
# Beginnings of the names of variables that a supervisor on another host gets from this environment.
_PASSED_ON = ("DS_", "NCCL_", "OMP_", "PYTHON", "TORCH_", "UCX_")
_HOST_LINE = re.compile(r"(?P<name>[^\s#=]+)(?:\s+slots=(?P<slots>[1-9]\d*))?\s*(?:#.*)?")


class Host(NamedTuple):
    """Host of a run, from a line of a hostfile such as `node1 slots=8`."""

    name: str  # as ssh takes it
    slots: int | None  # number of ranks; None if the line has none


def train(
    config: Annotated[
        Path | None, typer.Argument(help="YAML file of the run, for example configs/small.yaml, or its run folder")
    ] = None,
    config_option: Annotated[Path | None, typer.Option("--config", help="the same as the argument")] = None,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--gpus",
            "--ranks",
            min=1,
            help="ranks on each machine; default: as many as the run had before, else all GPUs, or on a CPU as many "
            "as the cores and the batch allow",
        ),
    ] = None,
    hostfile: Annotated[
        Path | None,
        typer.Option(
            help="start by ssh on the hosts of this file, with lines such as `node1 slots=8`; default: on this machine"
        ),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="take only the first hosts of the hostfile; default: all")
    ] = None,
    accept_new_numerics: AcceptNewNumerics = False,
    show_command: Annotated[
        bool, typer.Option("--show-command", help="print the same start as a command of deepspeed, and start nothing")
    ] = False,
) -> None:
    """Train: start a run, or continue it after any interruption. Ctrl-C saves and stops.

    Ranks that crash or hang are started again from the newest checkpoint. On Slurm, use `electra-dist submit`.

    Exit codes: 0 finished, 1 no more progress, 69 an unhealthy node, 75 stopped and saved (run the command again), 78
    an error that you must fix.
    """
    if (config is None) == (config_option is None):
        raise UserError("give the YAML file of a run, or its run folder, once: electra-dist train CONFIG")
    if nodes is not None and hostfile is None:
        raise UserError("--nodes needs --hostfile, a file with the names of the hosts")
    start = _Start.of(config or config_option or Path(), overrides or (), accept_new_numerics)
    hosts = _read_hosts(hostfile, nodes) if hostfile else []
    num_ranks = ranks or (_slots(hosts) if hosts else usual_ranks(start.config))
    if show_command:
        place = ["--hostfile", str(hostfile)] if hosts else []
        place += ["--num_nodes", str(nodes)] if nodes else []
        place += ["--num_gpus", str(num_ranks)] if ranks or not hosts else []
        script = "launcher/pretrain.py"
        program = [script] if Path(script).exists() else ["--module", "electra_launcher.pretrain"]
        print(printable(shlex.join(["deepspeed", *place, *program, *start.arguments])))
        return
    if hosts:
        code = _on_hosts(start, hosts, num_ranks)
    else:
        _check_here(start.config, num_ranks, accept_new_numerics)
        from electra_launcher.supervise.__main__ import main as supervise

        code = supervise([*start.arguments, "--gpus-per-node", str(num_ranks)])
    place = ["--hostfile", str(hostfile)] if hosts else []
    place += ["--nodes", str(nodes)] if nodes else []
    place += ["--gpus", str(ranks)] if ranks and hosts else []  # on this machine, the run's record has the number
    _print_next(open_console(soft_wrap=True), start.config.run_dir, place, code)
    raise typer.Exit(code)


class _Start(NamedTuple):
    """The config of a run to start, and the arguments by which every supervisor and rank reads the same config."""

    config: Config
    arguments: list[str]

    @classmethod
    def of(cls, file: Path, overrides: Sequence[str], accept_new_numerics: bool) -> _Start:
        """Read the config `file`, or that of the run folder `file`; a run whose folder was moved goes on in it."""
        from electra_dist.run.folder import CONFIG_FILE, is_run_folder, no_run, override_of_moved_run
        from electra_launcher.entry import read_config

        if file.is_dir():
            if not is_run_folder(file):
                raise no_run(file)
            folder, file = file, file / CONFIG_FILE
            named = read_config(str(file), overrides)[0].run_dir
            move = override_of_moved_run(folder, named)
            if move is not None and not any(override.startswith("run_dir=") for override in overrides):
                line = f"{folder} was moved or copied: its config names run_dir {named}; the run goes on in {folder}"
                print(printable(line), file=sys.stderr)
                overrides = [*overrides, move]
        arguments = ["--config", str(file)]
        for override in overrides:
            arguments += ["--set", override]
        arguments += ["--accept-new-numerics"] if accept_new_numerics else []
        return cls(read_config(str(file), overrides)[0], arguments)


def usual_ranks(config: Config) -> int:
    """Return the number of ranks for this machine: that of the last start, so that results repeat bit for bit.

    For the first start it is the number that fits the machine.
    """
    from electra_dist.gpu_affinity import visible_devices
    from electra_dist.run.environment_record import read_environment

    before: dict[str, int] = read_environment(Path(config.run_dir)).get("hosts", {})
    if len(before) > 1:
        raise UserError(
            f"{config.run_dir}: was trained on {', '.join(before)}; give --hostfile to go on there, or "
            f"--gpus to go on with so many ranks on this machine"
        )
    if before:
        return sum(before.values())
    num_gpus = 0 if os.environ.get("DS_ACCELERATOR") == "cpu" else len(visible_devices(os.environ))
    return num_gpus or _cpu_ranks(config, len(os.sched_getaffinity(0)))


def _cpu_ranks(config: Config, num_cores: int) -> int:
    """Return the largest number of ranks for which there are enough cores, and rows for a micro-batch of each."""
    global_batch, micro_batch = config.train.global_batch, config.train.micro_batch
    most = global_batch // micro_batch if isinstance(micro_batch, int) else global_batch
    return max(number for number in range(1, max(1, min(num_cores, most)) + 1) if global_batch % number == 0)


def _check_here(config: Config, num_ranks: int, accept_new_numerics: bool) -> None:
    """Raise UserError for what the ranks would refuse of the config and its files, before a rank is started.

    For corpora and checkpoints in the cloud, and if a disk does not respond, the ranks check: they wait for storage.
    """
    from electra_dist.config.rules import check_new_run
    from electra_dist.run.folder import is_run_folder
    from electra_dist.store.open_store import REMOTE_SCHEMES
    from electra_dist.store.patience import Patience
    from electra_dist.train.check_inputs import begins_at_step_0, check_inputs, remarks_on_corpora

    corpora = [corpus.url for corpus in config.data.training_corpora()]
    stores = [*corpora, config.data.heldout or "", *config.checkpoint.targets]
    if any(url.startswith(REMOTE_SCHEMES) for url in stores):
        return
    config, _ = config.for_ranks(num_ranks)
    with contextlib.suppress(StoreAway):
        if not is_run_folder(Path(config.run_dir)):
            check_new_run(config)
        inputs = check_inputs(config, num_ranks, accept_new_numerics, patience=Patience(0.0))
        remarks_on_corpora(inputs.config, inputs.corpora, begins=begins_at_step_0(inputs))


def _read_hosts(file: Path, wanted: int | None) -> list[Host]:
    """Return the first `wanted` hosts of a hostfile; if `wanted` is None, all of them.

    Raises UserError for a line that names no host, and if there are fewer hosts than wanted, or none.
    """
    from electra_dist.store.atomic_files import read_regular, readable

    with readable(file):
        lines = read_regular(file).decode(errors="replace").splitlines()
    texts = [(number, line.strip()) for number, line in enumerate(lines, start=1)]
    hosts = [_parse_host(text, f"{file}:{number}") for number, text in texts if text and not text.startswith("#")]
    least = wanted or 1
    if len(hosts) < least:
        raise UserError(f"{file}: names {len(hosts)} hosts, fewer than {least}; add a line for each host")
    return hosts[:wanted]


def _parse_host(text: str, place: str) -> Host:
    """Parse a line of a hostfile; raise UserError, which begins with `place`, if it names no host."""
    found = _HOST_LINE.fullmatch(text)
    if found is None or found["name"].startswith("-"):
        raise UserError(f"{place}: {text!r} names no host; write a line such as: node1 slots=8")
    return Host(found["name"], int(found["slots"]) if found["slots"] else None)


def _slots(hosts: Sequence[Host]) -> int:
    """Return how many ranks each host has by its line of the hostfile; raise UserError unless all have the same."""
    number, *others = {host.slots for host in hosts}
    if others or number is None:
        raise UserError(
            "the hosts of the hostfile need the same number of ranks each; write slots=N, or give --gpus N"
        )
    return number


def _on_hosts(start: _Start, hosts: Sequence[Host], num_ranks: int) -> int:
    """Start a supervisor on each host by ssh, wait for all, and return the exit code of the first host's."""
    environment = [f"{name}={value}" for name, value in os.environ.items() if name.startswith(_PASSED_ON)]
    program = ["env", *environment, sys.executable, "-m", "electra_launcher.supervise", *start.arguments]
    program += ["--nodes", str(len(hosts)), "--master-addr", hosts[0].name, "--gpus-per-node", str(num_ranks)]
    program += ["--session", f"train-{time.time():.0f}"]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # The same as Ctrl-C.
    supervisors = []
    for node, host in enumerate(hosts):
        words = shlex.join([*program, "--node-rank", str(node)])
        # A terminal on the host, so that its supervisor ends if the connection does; a session here, so that Ctrl-C
        # does not end the connection.
        ssh = ["ssh", "-tt", "-q", "-o", "BatchMode=yes", host.name, f"cd {shlex.quote(os.getcwd())} && exec {words}"]
        quiet = None if node == 0 else subprocess.DEVNULL  # RUN/supervise-K.log has what it prints, too
        supervisors.append(subprocess.Popen(ssh, stdin=subprocess.DEVNULL, stdout=quiet, start_new_session=True))
    codes = _codes_of(supervisors, Path(start.config.run_dir))
    unreachable = [host.name for host, code in zip(hosts, codes, strict=True) if code == _SSH_FAILED]
    if unreachable:
        raise UserError(f"ssh to {', '.join(unreachable)} failed; check that `ssh {unreachable[0]} true` works")
    return codes[0]


def _codes_of(supervisors: Sequence[subprocess.Popen[bytes]], run_dir: Path) -> list[int]:
    """Wait for the supervisors and return their exit codes. Ctrl-C makes the ranks save; a second one ends them."""
    from electra_dist.run.folder import STOP_FILE
    from electra_dist.store.atomic_files import replacing
    from electra_dist.train.stop_request import INTERRUPTED

    num_interrupts = 0
    while True:
        codes = [one.poll() for one in supervisors]
        if None not in codes:
            return [one.wait() for one in supervisors]
        try:
            if _SSH_FAILED in codes or num_interrupts > 1:
                for one in supervisors:
                    one.terminate()  # The end of the connection is a SIGHUP for the supervisor.
            time.sleep(0.2)
        except KeyboardInterrupt:
            num_interrupts += 1
            if num_interrupts == 1:
                run_dir.mkdir(parents=True, exist_ok=True)
                with replacing(run_dir / STOP_FILE) as file:
                    file.write(INTERRUPTED.encode())


def _print_next(out: Console, run_dir: str, place: Sequence[str], code: int) -> None:
    """Print the command to run next, if the run is finished or has stopped; `place`: options on where it runs."""
    from electra_dist.run.folder import REPORT_FILE

    if code == EXIT_DONE:
        report = Path(run_dir) / REPORT_FILE
        curves = f", {report} has its curves" if report.exists() else ""
        out.print(f"finished{curves}; next: electra-dist export {shlex.quote(run_dir)}")
    elif code == EXIT_STOPPED:
        out.print(f"to go on: electra-dist train {shlex.join([run_dir, *place])}")
