"""Machines on one machine: each a set of Linux namespaces with its own address, host name, /proc, /dev/shm and pid 1.

They hang on a bridge and share the file system, as a cluster's nodes do. A machine can lose its power (nothing is said
to anybody), be booted again, or be cut off; sshd runs in each if wanted. Needs root, iproute2, nftables, util-linux.

Up in 0.1 s each. Where it stops: one kernel, one clock; no delay or loss on the links.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_INIT = r"""
read -r outer _ </proc/self/stat                 # our process number as the host sees it
hostname "$name" && mount --make-rprivate /
mount -t proc proc /proc && mount -t tmpfs tmpfs /dev/shm
mount --bind "$folder/hosts" /etc/hosts
mount --bind "$folder/nsswitch.conf" /etc/nsswitch.conf
[ ! -e "$folder/ssh/config" ] || mount --bind "$folder/ssh/config" /etc/ssh/ssh_config
echo "$outer" >"$folder/$name/pid.new" && mv "$folder/$name/pid.new" "$folder/$name/pid"
until ip link show eth0 >/dev/null 2>&1; do sleep 0.01; done
ip addr add "$address/24" dev eth0 && ip link set lo up && ip link set eth0 up
[ ! -e "$folder/ssh/sshd_config" ] || /usr/sbin/sshd -f "$folder/ssh/sshd_config"
eval "$on_boot"
while :; do sleep 3600 & wait $!; done           # bash reaps what is left behind
"""


# Programs and the Debian packages that have them; those of PACKAGES are needed by every machine.
PACKAGES = {"ip": "iproute2", "nft": "nftables", "unshare": "util-linux", "nsenter": "util-linux"}
SSH_PACKAGES = {"pdsh": "pdsh", "ssh": "openssh-client", "/usr/sbin/sshd": "openssh-server"}
SLURM_PACKAGES = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm", "munged": "munge"}


def missing(more: Mapping[str, str] | None = None) -> str:
    """Return why there can be no machines here, with all absent programs and their packages; empty if there can.

    Args:
        more: further programs that are needed, with the package of each.
    """
    needed = PACKAGES | dict(more or {})
    absent = [program for program in needed if shutil.which(program) is None]
    reasons = []
    if os.geteuid() != 0:
        reasons.append("needs root (network namespaces)")
    if absent:
        packages = sorted({needed[program] for program in absent})
        reasons.append(f"not installed: {', '.join(absent)} (Debian packages {' '.join(packages)})")
    if reasons:
        return "; ".join(reasons)
    trial = [
        "unshare",
        "--net",
        "--mount",
        "--pid",
        "--fork",
        "sh",
        "-c",
        "ip link add trial0 type bridge && nft list tables",
    ]
    done = subprocess.run(trial, capture_output=True, text=True, check=False)
    return f"no network namespaces here: {done.stderr.strip()}" if done.returncode else ""


class Machines:
    """A context manager: machines n1, n2, ... are up inside it, and nothing of them is left after it."""

    def __init__(self, folder: Path, count: int, *, network: int = 77, ssh: bool = False, on_boot: str = "") -> None:
        """`folder` must be readable by all; `network` sets clusters apart: 10.99.NETWORK.0/24."""
        self.folder, self.network, self.ssh, self.on_boot = folder, network, ssh, on_boot
        self.names = [f"n{i}" for i in range(1, count + 1)]
        self.bridge = f"edbr{network}"
        self.head_address = self._address(254)

    def __enter__(self) -> Machines:
        self.folder.mkdir(parents=True, exist_ok=True)
        _run("ip", "link", "del", self.bridge, check=False)
        _run("ip", "link", "add", self.bridge, "type", "bridge", "forward_delay", "0")
        _run("ip", "addr", "add", f"{self.head_address}/24", "dev", self.bridge)
        _run("ip", "link", "set", self.bridge, "up")
        points = {"a": "prerouting", "b": "postrouting"}
        hooks = [f"chain {c} {{ type filter hook {hook} priority 0; }}; " for c, hook in points.items()]
        _run("nft", "-f", "-", text=f"table bridge {self.bridge} {{ {''.join(hooks)}}};")
        hosts = [f"{self.address(name)} {name}" for name in self.names]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"{self.head_address} head", *hosts, ""]))
        # Without a name server each connection of gloo would wait 10 s for one.
        (self.folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        if self.ssh:
            self._make_keys()
        for name in self.names:
            self.boot(name)
        if self.ssh:
            for name in self.names:
                wait_for(lambda name=name: _answers(self.address(name), 22), 10, f"no sshd on {name}")
        return self

    def __exit__(self, *exc: object) -> None:
        for name in self.names:
            self.crash(name)
        _run("nft", "delete", "table", "bridge", self.bridge, check=False)
        _run("ip", "link", "del", self.bridge, check=False)

    def address(self, name: str) -> str:
        """The machine's IPv4 address."""
        return self._address(int(name[1:]))

    def boot(self, name: str) -> None:
        """Power on."""
        (self.folder / name).mkdir(exist_ok=True)
        (self.folder / name / "pid").unlink(missing_ok=True)
        _run("ip", "link", "del", self._port(name), check=False)
        environment = {"name": name, "folder": str(self.folder), "address": self.address(name)}
        environment |= {"on_boot": self.on_boot, "cgroup": self.cgroup(name)}
        with open(self.folder / name / "init.log", "ab") as log:
            subprocess.Popen(
                ["unshare", "--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "bash", "-c", _INIT],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_for(lambda: self.pid(name) is not None, 10, f"{name} does not boot: {self.folder}/{name}/init.log")
        netns = str(self.pid(name))
        _run("ip", "link", "add", self._port(name), "type", "veth", "peer", "name", "eth0", "netns", netns)
        _run("ip", "link", "set", self._port(name), "master", self.bridge, "up")

    def crash(self, name: str) -> None:
        """Power off without a word: no packet leaves once it begins."""
        _run("ip", "link", "set", self._port(name), "down", check=False)
        pid = self.pid(name)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)  # the kernel kills everything in the machine with its pid 1
            wait_for(lambda: not alive(pid), 10, f"{name} does not go down")
        (self.folder / name / "pid").unlink(missing_ok=True)

    def cut(self, name: str) -> None:
        """Drop everything from and to a machine; it runs on. Undone by `heal`."""
        _run("nft", "add", "rule", "bridge", self.bridge, "a", "iifname", self._port(name), "drop")
        _run("nft", "add", "rule", "bridge", self.bridge, "b", "oifname", self._port(name), "drop")

    def heal(self) -> None:
        """Undo every cut."""
        for chain in ("a", "b"):
            _run("nft", "flush", "chain", "bridge", self.bridge, chain)

    def cgroup(self, name: str) -> str:
        """A name for control groups of this machine alone."""
        return self._port(name)

    def pid(self, name: str) -> int | None:
        """Its pid 1, as the host numbers it; None when it is off."""
        file = self.folder / name / "pid"
        return int(file.read_text()) if file.exists() else None

    def inside(self, name: str, *command: str) -> list[str]:
        """The command that runs `command` on a machine, in the current folder."""
        return ["nsenter", "-t", str(self.pid(name)), "-m", "-u", "-n", "-i", "-p", f"-W{os.getcwd()}", "--", *command]

    def processes(self, name: str, word: str) -> list[int]:
        """Processes of a machine, as the host numbers them, whose command line has `word`."""
        namespace = os.readlink(f"/proc/{self.pid(name)}/ns/pid")
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(folder / "ns/pid") == namespace and word.encode() in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
        return sorted(found)

    def _address(self, host: int) -> str:
        return f"10.99.{self.network}.{host}"

    def _port(self, name: str) -> str:
        return f"{self.bridge}-{name}"

    def _make_keys(self) -> None:
        folder = self.folder / "ssh"
        folder.mkdir(exist_ok=True)
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd wants it; a package's start script would make it
        for key in ("id", "host"):
            if not (folder / key).exists():
                _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
        (folder / "authorized").write_bytes((folder / "id.pub").read_bytes())
        (folder / "sshd_config").write_text(
            f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\nPidFile none\nStrictModes no\nUsePAM no\n"
            "PermitRootLogin prohibit-password\nPasswordAuthentication no\nMaxStartups 100\n"
        )
        (folder / "config").write_text(
            f"Host *\n IdentityFile {folder}/id\n StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n"
            " LogLevel ERROR\n BatchMode yes\n"
        )


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead but not yet reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


def wait_for(condition: Callable[[], object], timeout_s: float, otherwise: Callable[[], str] | str) -> float:
    """Seconds until `condition` holds. Raises TimeoutError with what `otherwise` is or then says."""
    begin = time.monotonic()
    while not condition():
        if time.monotonic() - begin > timeout_s:
            raise TimeoutError(f"after {timeout_s:.0f} s: {otherwise if isinstance(otherwise, str) else otherwise()}")
        time.sleep(0.02)
    return time.monotonic() - begin


def _run(*command: str, check: bool = True, text: str | None = None) -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def show(command: Sequence[str], env: dict[str, str] | None = None) -> str:
    """What a command prints, empty if it fails."""
    environment = {**os.environ, **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment).stdout
