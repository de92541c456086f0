"""A real Slurm on those machines: slurmctld and munge on the host, a slurmd in each machine. Up in about a second.

By hand:  python tests/cluster/slurm.py 3      a shell with sinfo, sbatch, ... on a cluster of three; it ends with it

Debian's slurm-wlm and munge. The settings that matter: a node counts as down after `timeout_s` of silence; credentials
expire after 10 s, since a requeued job waits for that (121 s by default). The rest is what Slurm 22.05 needs here.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

from machines import SLURM_PACKAGES, Machines, alive, missing, show, wait_for

_CONF = """
ClusterName=electra
SlurmctldHost={host}({head})
SlurmctldPort={port}
SlurmdPort={slurmd_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=10
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n/slurmd.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/{task}
SelectType=select/cons_tres
SelectTypeParameters={resources}
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0,bf_interval=2
ReturnToService=2
SlurmdTimeout={timeout}
MessageTimeout={timeout}
KillWait=30
UnkillableStepTimeout=30
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
NodeName=DEFAULT CPUs=4 RealMemory=8000
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=batch Nodes=ALL Default=YES State=UP OverSubscribe=NO
PartitionName=urgent Nodes=ALL State=UP OverSubscribe=NO PriorityTier=10
"""


# As on real clusters, a job's processes are known by their cgroup: killed to the last one, whoever their parent is.
_FREEZER = Path("/sys/fs/cgroup/freezer")
_MEMORY = Path("/sys/fs/cgroup/memory")
_OWN_GROUPS = f"""
for groups in {_FREEZER} {_MEMORY}; do
    [ ! -d $groups ] || {{ mkdir -p "$groups/$cgroup" && mount --bind "$groups/$cgroup" $groups; }}
done
"""


def slurm_missing() -> str:
    """Return why there can be no Slurm here; empty if there can."""
    return missing(SLURM_PACKAGES)


class SlurmCluster(Machines):
    """Machines with Slurm. `environment` holds SLURM_CONF, for sbatch and friends on the host."""

    def __init__(
        self, folder: Path, count: int, *, network: int = 78, timeout_s: int = 5, limits_memory: bool = False
    ) -> None:
        """`limits_memory`: jobs have the memory of `--mem` only, which the kernel enforces."""
        super().__init__(folder, count, network=network, on_boot=_OWN_GROUPS + 'slurmd -N "$name"')
        self.timeout_s = timeout_s
        self.limits_memory = limits_memory
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> SlurmCluster:
        folder = self.folder
        (folder / "state").mkdir(parents=True, exist_ok=True)
        (folder / "slurm.conf").write_text(
            _CONF.format(
                host=socket.gethostname(),
                head=self.head_address,
                port=17000 + 2 * self.network,
                slurmd_port=17001 + 2 * self.network,
                folder=folder,
                timeout=self.timeout_s,
                proctrack="cgroup" if _FREEZER.is_dir() else "linuxproc",
                task="cgroup" if self.limits_memory else "none",
                resources="CR_Core_Memory" if self.limits_memory else "CR_Core",
                nodes="\n".join(f"NodeName={name} NodeAddr={self.address(name)}" for name in self.names),
            )
        )
        # The plugin is named: 22.05 has no other without systemd.
        limit = "ConstrainRAMSpace=yes\n" if self.limits_memory else ""
        (folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\n{limit}")
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        for name in self.names:
            (folder / name / "spool").mkdir(parents=True, exist_ok=True)
        os.environ.update(self.environment)  # before the machines boot: their slurmd reads it
        try:
            self._start_head()
            super().__enter__()
            wait_for(self._all_idle, 30, f"nodes are not idle: {self.slurm('sinfo')}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__()
        for name in self.names:
            for groups in (_FREEZER, _MEMORY):
                _remove_cgroup(groups / self.cgroup(name))
        for daemon in ("slurmctld", "munged"):
            self.stop_daemon(daemon)
        os.environ.pop("SLURM_CONF", None)

    def _start_head(self) -> None:
        f = self.folder
        names = ("key-file=munge.key", "socket=munge.sock", "pid-file=munged.pid", "log-file=munged.log")
        options = [f"--{name.replace('=', f'={f}/')}" for name in (*names, "seed-file=munged.seed")]
        subprocess.run(["munged", *options], check=True, capture_output=True)
        subprocess.run(["slurmctld"], check=True, capture_output=True)

    def stop_daemon(self, daemon: str) -> None:
        """Kill munged or slurmctld."""
        file = self.folder / f"{daemon}.pid"
        if file.exists():
            pid = int(file.read_text())
            if alive(pid):
                os.kill(pid, 15)
                wait_for(lambda: not alive(pid), 15, f"{daemon} does not end")

    def slurm(self, *command: str) -> str:
        """What a Slurm command prints."""
        return show(command, self.environment).strip()

    def node_state(self, name: str) -> str:
        """idle, allocated, down, drained, ..., with a `*` when it is silent."""
        return self.slurm("sinfo", "--noheader", "--partition=batch", f"--nodes={name}", "--format=%T")

    def job_state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETING, FAILED, TIMEOUT, NODE_FAIL, ...; UNKNOWN when Slurm has forgotten it."""
        words = dict(word.partition("=")[::2] for word in self.slurm("scontrol", "-o", "show", "job", job).split())
        return words.get("JobState", "UNKNOWN")

    def _all_idle(self) -> bool:
        return self.slurm("sinfo", "--noheader", "--partition=batch", "-N", "--format=%T").split() == ["idle"] * len(
            self.names
        )


def _remove_cgroup(folder: Path) -> None:
    """The groups of a machine that is off: folders that only rmdir removes, the innermost first."""
    for inner in sorted(folder.rglob("*"), reverse=True) if folder.is_dir() else []:
        if inner.is_dir():
            inner.rmdir()
    if folder.is_dir():
        folder.rmdir()


def main() -> None:
    """`slurm.py 3`: a shell on a cluster; in it, `slurm.py crash|boot|cut n2` and `slurm.py heal`."""
    command, *names = sys.argv[1:] or ["2"]
    if not command.isdigit():
        cluster = SlurmCluster(Path(os.environ["SLURM_CONF"]).parent, 9)
        getattr(cluster, command)(*names)
        return
    folder = Path(tempfile.mkdtemp(prefix="electra-cluster-", dir="/run"))
    folder.chmod(0o755)
    try:
        with SlurmCluster(folder, int(command)) as cluster:
            print({name: cluster.address(name) for name in cluster.names})
            subprocess.run([os.environ.get("SHELL", "bash")], check=False)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
