"""Python imports this at its start where this folder is in PYTHONPATH: no network, and a file names each attempt.

Every process that a preparation starts has it, because the environment is inherited.
"""

import os
import socket


def _refuse(*arguments, **options):
    with open(os.environ["NETWORK_ATTEMPTS"], "a") as out:
        out.write(f"{arguments[-1]!r}\n")
    raise OSError("a test allows no network")


def _connect(self, address, *, _connect=socket.socket.connect):
    if self.family == socket.AF_UNIX:
        return _connect(self, address)
    return _refuse(address)


socket.socket.connect = _connect
socket.getaddrinfo = _refuse
