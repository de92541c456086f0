"""What every program of this project does at its begin and its end: encoding, output, config, exit code.

Guarantees:
- An error that the user must fix is one line on stderr, and the exit code is 78; storage that stayed away and Ctrl-C
  give 75 (electra_dist/errors.py). Any other exception is a bug: it shows its traceback, and the exit code is 1.
- A program runs in Python's UTF-8 mode whatever the locale is. In a locale of another encoding, such as C with the
  UTF-8 mode off (PYTHONUTF8=0), Python cannot name a file whose name is not ASCII, and libraries that open text files
  without an encoding fail, as torch's compiler does.
- A program runs on when nobody reads its output: its terminal was closed, or the reader of its pipe has ended. Without
  this, the next line that it prints would end it. What a run prints is in its log file, too.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

from electra_dist.errors import EXIT_CRASH, EXIT_STOPPED, EXIT_USER_ERROR, StoreAway, UserError, error_line
from electra_dist.escapes import printable

if TYPE_CHECKING:
    from electra_dist.config import Config
    from electra_dist.store.patience import Patience

# The help text of --accept-new-numerics, which programs and commands have.
ACCEPT_NEW_NUMERICS = "continue a run that an older version began, although masks, samples or dropout will differ"
_OPTIONS: dict[str, dict[str, Any]] = {
    "--config": {"required": True, "help": "YAML file of the run, e.g. configs/large_25pct_mask.yaml"},
    "--set": {
        "action": "append",
        "default": [],
        "metavar": "KEY=VALUE",
        "help": "override one config key; may be repeated",
    },
    "--accept-new-numerics": {"action": "store_true", "help": ACCEPT_NEW_NUMERICS},
}
_STANDARD_FILES = (0, 1, 2)  # descriptors of stdin, stdout and stderr


def begin_program() -> None:
    """Prepare this process, which a user or another program has started. Call it before anything else."""
    _start_in_utf8_mode()
    outlive_the_reader()


def exit_code_of(
    program: Callable[[], int],
    *,
    shows: Callable[[UserError], bool] = lambda error: True,
    interrupted: str = "interrupted",
    code_if_away: int = EXIT_STOPPED,
) -> int:
    """Call `program` and return its exit code; if an error or Ctrl-C ends it, the exit code for that.

    `shows` tells whether this process prints an error that other processes of the program meet, too. `interrupted` is
    printed after Ctrl-C, unless it is "". `code_if_away` is the exit code if storage stayed unusable.
    """
    try:
        return program()
    except UserError as error:
        if shows(error):
            print(error_line(error), file=sys.stderr, flush=True)
        return code_if_away if isinstance(error, StoreAway) else EXIT_USER_ERROR
    except KeyboardInterrupt:
        if interrupted:
            print(printable(interrupted), file=sys.stderr, flush=True)
        return EXIT_STOPPED


def end_process_with(program: Callable[[], int]) -> NoReturn:
    """Call `program` and end the process with its exit code, without Python's own clean-up, which could abort it."""
    # Everything that must be kept has been written and closed by now. The clean-up would destroy the threads of
    # torch's process group and of the loader in an arbitrary order. A thread that is destroyed while it runs aborts
    # the process, and whoever started it would then see SIGABRT instead of the exit code.
    code = EXIT_CRASH
    try:
        code = program()
    except SystemExit as end:  # of argparse
        code = end.code if isinstance(end.code, int) else EXIT_CRASH
    except BaseException:  # noqa: BLE001  (the process ends here in any case)
        traceback.print_exc()
    with contextlib.suppress(OSError):  # Nobody may read the output any more.
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def add_options(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add options that several programs have to a command line: "--config", "--set" or "--accept-new-numerics"."""
    for name in names:
        parser.add_argument(name, **_OPTIONS[name])


def read_config(file: str, overrides: Sequence[str] = ()) -> tuple[Config, Patience]:
    """Load a config file; return it, and the `Patience` with which its run waits for storage.

    While the storage of the file itself does not respond, this call waits, too.
    """
    # Imported here, because the command line, which reads no config for `--help`, should start in a moment.
    from electra_dist.config import ClusterConfig
    from electra_dist.config.load import load_config
    from electra_dist.store.patience import Patience

    # The config is read with the default limit, because the config's own limit is not known before.
    config = load_config(file, overrides, patience=Patience(ClusterConfig().storage_patience_s))
    return config, Patience(config.cluster.storage_patience_s)


def _start_in_utf8_mode() -> None:
    """Replace this process by the same program in UTF-8 mode if the locale has another encoding."""
    if sys.flags.utf8_mode or sys.getfilesystemencoding() == "utf-8":
        return
    arguments = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
    os.execve(sys.executable, arguments, {**os.environ, "PYTHONUTF8": "1"})


class LastingStream:
    """A text stream that discards its output after the first failed write; otherwise it acts as the wrapped stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text`, or discard it if writing fails; return its length in both cases."""
        try:
            self._stream.write(text)
        except (OSError, ValueError):  # ValueError: the stream was closed in this process
            self._silence()
        return len(text)

    def flush(self) -> None:
        """Flush the stream; a failure is ignored."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._silence()

    def _silence(self) -> None:
        self._stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (kept until the process ends)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive_the_reader() -> None:
    """Make failed writes to stdout and stderr of this process harmless. Call this first, before any file is opened.

    If stdin, stdout or stderr was closed when the process started, as by `>&-`, it is opened on the null device.
    Otherwise the next opened file would get the free descriptor, and receive output that is meant for stdout.
    """
    for descriptor in _STANDARD_FILES:
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # Python found the file closed
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (kept until the process ends)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file name that is not UTF-8 is printed with escapes
        if not isinstance(stream, LastingStream):
            setattr(sys, name, cast(TextIO, LastingStream(stream)))
