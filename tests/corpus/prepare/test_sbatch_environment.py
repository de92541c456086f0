"""The environment of a submission: nothing of another job, and what a user has set."""

from __future__ import annotations

from electra_dist.corpus.prepare.sbatch_environment import environment_of_submission

KEPT = (
    *("SLURM_CONF", "SLURM_CLUSTERS", "SBATCH_EXPORT", "SBATCH_QOS", "SBATCH_GRES"),
    *("HOME", "AWS_ACCESS_KEY_ID", "NCCL_DEBUG"),
)
LEFT_OUT = (
    *("SLURM_JOB_ID", "SLURM_JOB_END_TIME", "SLURM_RESTART_COUNT", "SLURM_CPU_BIND", "SLURMD_NODENAME"),
    *("SRUN_EXPORT_ENV", "SRUN_CPUS_PER_TASK", "SALLOC_PARTITION", "SBATCH_WAIT", "SBATCH_TIMELIMIT"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    *("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"),
    *("ELECTRA_DIST_SUPERVISED", "ELECTRA_DIST_LEASE", "session", "master_addr", "master_port"),
)


def test_variables_of_a_job_a_step_or_a_rank_are_left_out_and_those_of_a_user_kept():
    environment = dict.fromkeys((*KEPT, *LEFT_OUT), "1")
    assert environment_of_submission(environment, ["time"]) == dict.fromkeys(KEPT, "1")


def test_a_default_of_the_user_holds_where_the_script_sets_nothing():
    environment = {"SBATCH_PARTITION": "cpu", "SBATCH_TIMELIMIT": "60"}
    assert environment_of_submission(environment, ["partition"]) == {"SBATCH_TIMELIMIT": "60"}
