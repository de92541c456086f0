"""Why a rank has ended: three excerpts of its output for each class, and what follows from the class."""

from __future__ import annotations

import signal

import pytest

from electra_dist.run.error_classes import CLASSES, class_of, classify, decisive, is_same_fault

TRACEBACK = 'Traceback (most recent call last):\n  File "/srv/w/train.py", line 31, in step\n    loss.backward()\n'

# name -> whose fault, the restart after it, and three ends of output, written for this test after real logs' form
EXCERPTS: dict[str, tuple[str, str, tuple[str, str, str]]] = {
    "ecc": (
        "node",
        "elsewhere",
        (
            f"{TRACEBACK}RuntimeError: CUDA error: uncorrectable ECC error encountered\nCompile with",
            "[ 912.4] NVRM: Xid (PCI:0000:1b:00): 94, pid=4411, name=python3, Contained: SM (0x1)",
            "kernel: NVRM: Xid (PCI:0000:c1:00): 48, pid='<unknown>', An uncorrectable double bit error (DBE)",
        ),
    ),
    "nvlink": (
        "node",
        "elsewhere",
        (
            f"{TRACEBACK}RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution",
            "NVRM: Xid (PCI:0000:3d:00): 74, pid=88, NVLink: fatal error detected on link 6(0x10000)",
            "what():  CUDA_ERROR_NVLINK_UNCORRECTABLE\nterminate called",
        ),
    ),
    "xid": (
        "node",
        "elsewhere",
        (
            "NVRM: Xid (PCI:0000:02:00): 79, pid=1034, GPU has fallen off the bus.",
            "Unable to determine the device handle for GPU0000:03:00.0: Unknown Error",
            f"{TRACEBACK}pynvml.NVMLError_GpuIsLost: GPU is lost",
        ),
    ),
    "device-assert": (
        "code",
        "as it is",
        (
            "Indexing.cu:1290: indexSelectLargeIndex: block: [17,0,0], thread: [96,0,0] Assertion `i < n` failed.\n"
            f"{TRACEBACK}RuntimeError: CUDA error: device-side assert triggered",
            "[rank3]: RuntimeError: CUDA error: device-side assert triggered",
            "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA_ERROR_ASSERT",
        ),
    ),
    "illegal-address": (
        "code",
        "as it is",
        (
            f"{TRACEBACK}torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
            "[rank1]: RuntimeError: CUDA error: misaligned address",
            "kernel: NVRM: Xid (PCI:0000:65:00): 31, pid=52, name=python, Ch 00000008, MMU Fault: ENGINE GRAPHICS",
        ),
    ),
    "cuda-out-of-memory": (
        "user",
        "as it is",
        (
            f"{TRACEBACK}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.44 GiB. GPU 3 has a total "
            "capacity of 79.11 GiB of which 1.02 GiB is free.",
            f"{TRACEBACK}RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "n4:77:190 [5] alloc.h:99 NCCL WARN Cuda failure 2 'out of memory'\n"
            f"{TRACEBACK}RuntimeError: CUDA error: out of memory",
        ),
    ),
    "shared-memory": (
        "job",
        "as it is",
        (
            f"{TRACEBACK}RuntimeError: unable to write to file </torch_71_3>: unable to allocate shared memory(shm)",
            "RuntimeError: DataLoader worker (pid 71) is killed by signal: Bus error. Perhaps dataloader's "
            "workers are out of shared memory: insufficient shared memory (shm)",
            "n1:9:40 [0] NCCL WARN Error while creating shared memory segment /dev/shm/nccl-9qXw (size 9637888)",
        ),
    ),
    "host-out-of-memory": (
        "job",
        "as it is",
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=771.0. Some tasks have been OOM Killed.",
            "terminate called after throwing an instance of 'std::bad_alloc'",
            f"{TRACEBACK}RuntimeError: [enforce fail at a.cpp:117] DefaultCPUAllocator: can't allocate memory: "
            "you tried to allocate 51539607552 bytes.",
        ),
    ),
    "disk-quota": (
        "user",
        "as it is",
        (
            f"{TRACEBACK}OSError: [Errno 122] Disk quota exceeded: '/home/ada/runs/a/metrics.jsonl'",
            "cp: error writing 'step-100/rank-0.bin': Disk quota exceeded",
            f"{TRACEBACK}botocore.exceptions.ClientError: An error occurred (QuotaExceeded) when calling PutObject",
        ),
    ),
    "storage": (
        "node",
        "as it is",
        (
            f"{TRACEBACK}OSError: [Errno 116] Stale file handle: '/lustre/corpus/shard-00007.bin'",
            f"{TRACEBACK}OSError: [Errno 5] Input/output error",
            f"{TRACEBACK}OSError: [Errno 107] Transport endpoint is not connected: '/mnt/fuse/corpus'",
        ),
    ),
    "driver": (
        "node",
        "elsewhere",
        (
            f"{TRACEBACK}RuntimeError: Found no NVIDIA driver on your system. Please check that you have a GPU.",
            "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040).",
            f"{TRACEBACK}ImportError: libcuda.so.1: cannot open shared object file: No such file or directory",
        ),
    ),
    "library": (
        "user",
        "as it is",
        (
            f"{TRACEBACK}ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory",
            f"{TRACEBACK}ImportError: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.34' not found",
            f"{TRACEBACK}ImportError: /opt/fused.so: undefined symbol: _ZN3c104cuda9SetDeviceEi",
        ),
    ),
    "import": (
        "user",
        "as it is",
        (
            f"{TRACEBACK}ModuleNotFoundError: No module named 'deepspeed'",
            f"{TRACEBACK}ImportError: cannot import name 'Tensor' from partially initialized module 'torch'",
            "/opt/venv/bin/python: No module named electra_launcher",
        ),
    ),
    "port": (
        "job",
        "as it is",
        (
            f"{TRACEBACK}torch.distributed.DistNetworkError: The server socket has failed to bind. port: 29500, "
            "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
            f"{TRACEBACK}OSError: [Errno 98] Address already in use",
            "RuntimeError: failed to listen on any local address (errno: 98 - Address already in use).",
        ),
    ),
    "network": (
        "node",
        "as it is",
        (
            "n7:83:126 [3] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<36315> with "
            "status=12 opcode=1 len=0 vendor err 129 (Send)",
            "n7:83:126 [3] NCCL WARN Call to ibv_modify_qp failed with error Connection timed out errno 110",
            f"{TRACEBACK}torch.distributed.DistNetworkError: failed to connect to 10.0.0.9: No route to host",
        ),
    ),
    "nccl-timeout": (
        "job",
        "as it is",
        (
            "[rank2]:[E101 ProcessGroupNCCL.cpp:632] [Rank 2] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=88, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600021 milliseconds before timing out.",
            f"{TRACEBACK}RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv "
            "operation to complete",
            f"{TRACEBACK}torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//0",
        ),
    ),
    "peer-abort": (
        "job",
        "as it is",
        (
            f"{TRACEBACK}RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.3]:51312",
            f"{TRACEBACK}torch.distributed.DistBackendError: NCCL error in: Utils.hpp:275, remote process exited or "
            "there was a network error\nncclRemoteError: A call failed possibly due to a network error",
            "[rank5]: RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection reset by peer",
        ),
    ),
    "preemption": (
        "job",
        "as it is",
        (
            "slurmstepd: error: *** JOB 3239 ON cn119 CANCELLED AT 2026-06-18T13:05:36 DUE TO PREEMPTION ***",
            "slurmstepd: error: *** STEP 3239.0 ON cn119 CANCELLED AT 2026-06-18T13:05:36 DUE TO TIME LIMIT ***",
            "slurmstepd: error: *** JOB 3239 ON cn7 CANCELLED AT 2026-06-18T01:00:09 DUE TO NODE FAILURE, SEE LOG ***",
        ),
    ),
    "exception": (
        "code",
        "as it is",
        (
            f"{TRACEBACK}ValueError: 30522 is no token id",
            f"{TRACEBACK}KeyError: 'labels'",
            f"{TRACEBACK}\nDuring handling of the above exception, another exception occurred:\n\n{TRACEBACK}"
            "mypackage.errors.BadRow: row 7\n  of shard 3",
        ),
    ),
    "unknown": ("code", "as it is", ("", "killed all children", "step 12: loss 8.51")),
}


@pytest.mark.parametrize("name", EXCERPTS)
def test_the_output_of_a_rank_gives_the_class_whose_fault_it_is_and_the_restart(name: str) -> None:
    fault, restart, outputs = EXCERPTS[name]
    for output in outputs:
        found = classify(1, f"step 11: loss 8.5301\n{output}\n" if output else "")
        assert found.error.name == name, output
        assert (found.error.fault, found.error.restart) == (fault, restart)
        assert found.line in output and found.error.next_step


def test_every_class_with_patterns_has_three_excerpts() -> None:
    assert {error.name for error in CLASSES} < set(EXCERPTS)


@pytest.mark.parametrize(
    ("code", "output", "kills", "name", "restart"),
    [
        (-signal.SIGKILL, "", 0, "killed", "as it is"),
        (-signal.SIGTERM, "", 0, "killed", "as it is"),
        (-signal.SIGHUP, "RuntimeError: CUDA out of memory", 0, "killed", "as it is"),  # an earlier, handled error
        (-signal.SIGKILL, "", 1, "host-out-of-memory", "as it is"),
        (
            -signal.SIGKILL,
            "slurmstepd: error: Detected 2 oom_kill events in StepId=9.0",
            0,
            "host-out-of-memory",
            "as it is",
        ),
        (-signal.SIGTERM, "", 1, "killed", "as it is"),  # the kernel kills with SIGKILL
        (-signal.SIGSEGV, "Fatal Python error: Segmentation fault", 0, "native-crash", "as it is"),
        (-signal.SIGABRT, "", 0, "native-crash", "as it is"),
        (-signal.SIGABRT, "Watchdog caught collective operation timeout", 0, "nccl-timeout", "as it is"),
        (78, "error: config.yaml: `seed`: missing key", 0, "refused", "never"),
        (69, "error: GPU 3 is unhealthy", 0, "unhealthy", "elsewhere"),
        (75, "error: /runs/a: disk full", 0, "storage-away", "as it is"),
    ],
)
def test_the_exit_code_tells_where_the_output_does_not(
    code: int, output: str, kills: int, name: str, restart: str
) -> None:
    found = classify(code, output, kills)
    assert (found.error.name, found.error.restart) == (name, restart)


def test_what_a_rank_has_survived_does_not_count() -> None:
    survived = (
        "waiting up to 600 s for storage: /runs/a: disk full (No space left on device)\n"
        "storage is back after 3 s: Connection reset by peer\n"
        "n1:23:40 [7] NCCL INFO TUNER/Plugin: libnccl-net.so: cannot open shared object file: No such file\n"
    )
    assert classify(1, f"{survived}{TRACEBACK}ValueError: no").error.name == "exception"


def test_the_prefix_that_torch_puts_before_each_line_of_a_rank_does_not_hide_a_traceback() -> None:
    lines = f"{TRACEBACK}ValueError: row 3 has the label 7".splitlines()
    found = classify(1, "\n".join(f"[rank12]: {line}" for line in lines))
    assert (found.error.name, found.line) == ("exception", "ValueError: row 3 has the label 7")


def test_the_rank_that_failed_first_explains_the_end_of_all() -> None:
    peers = [(rank, classify(1, "RuntimeError: Connection closed by peer")) for rank in (0, 1, 2)]
    cause = (3, classify(1, f"{TRACEBACK}RuntimeError: CUDA error: device-side assert triggered"))
    killed = (4, classify(-9, ""))
    assert decisive([*peers, killed, cause]) == cause
    assert decisive([*peers, killed]) == killed
    assert decisive(peers) == peers[0]
    silent, speaking = (0, classify(78, "")), (1, classify(78, "error: c: a shard is missing\n"))
    assert decisive([silent, speaking]) == speaking, "one rank prints what all of them refuse"
    assert decisive([silent]) == silent
    assert decisive([]) is None


@pytest.mark.parametrize(
    "line",
    [
        "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms connecting to (n0, 1)",
        "torch.distributed.DistBackendError: NCCL error in: Utils.hpp:328, unhandled system error, ncclSystemError",
        "RuntimeError: [gloo/transport/tcp/pair.cc:144] no error",
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "botocore.exceptions.EndpointConnectionError: Could not connect to the endpoint URL",
    ],
)
def test_a_failed_connection_is_no_fault_of_the_code_however_often_it_comes_back(line: str) -> None:
    assert not classify(1, f"{TRACEBACK}{line}").error.repeats_are_final


def test_faults_are_the_same_if_only_numbers_differ() -> None:
    assert is_same_fault("ValueError: row 7 at 0x7f12ab", "ValueError: row 12 at 0x7f99cd")
    assert not is_same_fault("ValueError: row 7", "KeyError: 7")


def test_a_class_of_a_newer_version_is_unknown() -> None:
    assert class_of("cosmic-ray").name == "unknown"
