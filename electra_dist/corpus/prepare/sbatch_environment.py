"""Choose the environment that a Slurm job is given, and quote values for #SBATCH lines.

Guarantee: a job inherits no variable that describes another job, a step or a rank, whether a person or a job submits
it. Slurm overwrites such a variable only if its version has it and it applies to the new job; otherwise the job would
take over the value of another job, such as its end time or its number of requeues.

How: programs that call sbatch pass it `environment_of_submission`; a batch script that calls sbatch first unsets the
variables that `patterns_left_out` and `HANDED_ON` name.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from electra_dist.errors import UserError

# Shell patterns of the names of variables that describe a job, a step or a rank.
_NOT_HANDED_ON = (
    *("SLURM_*", "SLURMD_*", "SRUN_*", "SALLOC_*"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "CROSS_RANK", "CROSS_SIZE"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_*", "TORCHELASTIC_*", "MASTER_ADDR", "MASTER_PORT"),
    *("PMI_*", "PMI2_*", "PMIX_*", "OMPI_COMM_WORLD_*", "MV2_COMM_WORLD_*"),
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    *("ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL"),
    # Those of this project: a supervisor's mark and token for its ranks, and what a batch script exports to its nodes.
    *("ELECTRA_DIST_*", "session", "master_addr", "master_port"),
    # Options of sbatch that a script sets or must not have. Such a variable overrules an #SBATCH line.
    *("SBATCH_ARRAY_INX", "SBATCH_CPUS_PER_GPU", "SBATCH_ERROR", "SBATCH_EXCLUSIVE", "SBATCH_GPUS", "SBATCH_INPUT"),
    *("SBATCH_GPUS_PER_*", "SBATCH_JOB_NAME", "SBATCH_MEM_PER_*", "SBATCH_NO_KILL", "SBATCH_NO_REQUEUE"),
    *("SBATCH_OPEN_MODE", "SBATCH_OUTPUT", "SBATCH_REQUEUE", "SBATCH_SIGNAL", "SBATCH_TRES_PER_TASK", "SBATCH_WAIT"),
)
# Exceptions: how the commands of Slurm reach their cluster.
HANDED_ON = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
# Options of sbatch for which the variable of a user holds if the script does not set them.
_VARIABLE_OF_OPTION = {
    "account": "SBATCH_ACCOUNT",
    "clusters": "SBATCH_CLUSTERS",
    "constraint": "SBATCH_CONSTRAINT",
    "partition": "SBATCH_PARTITION",
    "qos": "SBATCH_QOS",
    "reservation": "SBATCH_RESERVATION",
    "time": "SBATCH_TIMELIMIT",
    "wckey": "SBATCH_WCKEY",
}


def environment_of_submission(environment: Mapping[str, str], script_options: Collection[str]) -> dict[str, str]:
    """Return the environment variables with which to run sbatch, without those that describe another job.

    The new job inherits the returned variables. `script_options` names the options that the batch script sets, such as
    "time"; variables that would overrule these options are left out, too.
    """
    patterns = patterns_left_out(script_options)
    return {
        name: value
        for name, value in environment.items()
        if name in HANDED_ON or not any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def patterns_left_out(script_options: Collection[str]) -> tuple[str, ...]:
    """Return shell patterns of the variables that a submitted job must not inherit, unless they are in `HANDED_ON`.

    `script_options` names the options of sbatch that the job's script sets.
    """
    overruling = [name for option, name in _VARIABLE_OF_OPTION.items() if option in script_options]
    return (*_NOT_HANDED_ON, *overruling)


def directive(value: object) -> str:
    """Quote the name or the value of an sbatch option for Slurm's own parser of #SBATCH lines.

    That parser reads quotes as a shell does, but never takes a backslash literally, not even within single quotes. A
    value with a backslash or a control character is therefore refused with UserError.
    """
    text = str(value)
    if "\\" in text or not text.isprintable():
        raise UserError(
            f"{text!r}: an #SBATCH line can hold no backslash and no control character; choose a value without them"
        )
    return shlex.quote(text)
