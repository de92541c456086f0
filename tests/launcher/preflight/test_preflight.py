"""Preflight as a node runs it: with a fake NVML, without NVML, and with storage that cannot be used."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
from electra_launcher.preflight import __main__ as preflight
from electra_launcher.preflight.__main__ import main
from support import s3_server
from support.real_runs import REPOSITORY, write_corpus

from electra_dist.data.node_cache import choose_cache_folder
from electra_dist.errors import StoreAway
from electra_dist.run.failures import read_strikes
from electra_dist.run.heartbeat import Beat, read_heartbeats
from electra_dist.store.atomic_files import replacing
from electra_dist.store.open_store import open_store

STUB = REPOSITORY / "tests" / "support" / "fake_nvml"


def run(config: Path, *args: str, gpus: list[dict[str, Any]] | None = None, **env: str):
    """Run the preflight of a node called n1, with `gpus` (differences from a healthy H200) or without NVML."""
    if gpus is not None:
        env |= {"PYTHONPATH": str(STUB), "FAKE_NVML": json.dumps(gpus)}
    command = [sys.executable, "-m", "electra_launcher.preflight", "--config", str(config), *args]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "SLURMD_NODENAME": "n1", **env}
    )


def findings(done: subprocess.CompletedProcess[str]) -> list[tuple[str, str]]:
    """Return severity and text of each finding in the printed JSON, whose exit code must be that of the process."""
    tree = json.loads(done.stdout)
    assert tree["exit_code"] == done.returncode
    return [(finding["severity"], finding["what"]) for finding in tree["findings"]]


def test_a_node_without_gpus_is_ok_and_one_line_reports_that_there_are_none(tiny_config: Callable[..., Path]):
    done = run(tiny_config())
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["ok"] * 6
    assert sum("no GPU" in line for line in lines) == 1


@pytest.mark.real_start
def test_without_nvidia_ml_py_and_without_gpus_torch_is_not_imported(tiny_config: Callable[..., Path]):
    code = (
        "import sys; sys.modules['pynvml'] = None; sys.argv[0] = 'preflight.py'\n"
        "from electra_launcher.preflight.__main__ import main\n"
        "code = main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(code)\n"
    )
    command = [sys.executable, "-c", code, "--config", str(tiny_config())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "no GPU to check: NVML finds none, or nvidia-ml-py is not installed" in done.stdout


def test_an_unhealthy_gpu_gives_69_and_one_strike_and_a_healthy_node_adds_none(tiny_config: Callable[..., Path]):
    config = tiny_config()
    run_dir = config.parent / "run"
    sick = run(config, gpus=[{}, {"remapped_rows": [0, 1, 0, 1], "recovery_action": 2}])
    assert sick.returncode == 69, sick.stderr
    assert [(s.node, s.device, s.by) for s in read_strikes(run_dir)] == [("n1", "GPU 1", "preflight")]
    assert "could not be replaced by a spare" in read_strikes(run_dir)[0].reason
    fit = run(config, "--json", gpus=[{}, {}])
    assert fit.returncode == 0
    assert [severity for severity, _ in findings(fit)] == ["ok"] * 7 + ["warning"]  # this build of torch has no CUDA
    assert len(read_strikes(run_dir)) == 1


def test_mistakes_in_the_config_of_storage_give_78_and_no_strike(tiny_config: Callable[..., Path], tmp_path: Path):
    (tmp_path / "file").write_text("")
    blocked = f"checkpoint.targets=[{tmp_path}/file/target]"
    missing = run(tiny_config(), "--json", "--set", f"data.corpus={tmp_path}/nowhere", "--set", blocked)
    assert missing.returncode == 78
    wrong = [what for severity, what in findings(missing) if severity == "user error"]
    assert len(wrong) == 2
    assert "nowhere/corpus.json: no finished corpus" in wrong[0]
    assert "file" in wrong[1]
    assert read_strikes(tmp_path / "run") == []


def test_a_run_that_will_fill_the_disk_is_refused_before_it_starts(tiny_config: Callable[..., Path]):
    done = run(tiny_config(), "--json", "--set", "checkpoint.keep_last=100000000000")
    assert done.returncode == 78
    (wrong,) = [what for severity, what in findings(done) if severity == "user error"]
    assert "for 100000000001 checkpoints" in wrong


def test_an_unknown_key_gives_one_line_and_78(tiny_config: Callable[..., Path]):
    done = run(tiny_config(), "--set", "train.batch=1")
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.startswith("error: --set: unknown key `train.batch`")
    assert done.stderr.count("\n") == 1


def test_preflight_leaves_no_file_in_the_run_folder(tiny_config: Callable[..., Path]):
    config = tiny_config()
    assert run(config).returncode == 0
    run_dir = config.parent / "run"
    assert [path for path in run_dir.rglob("*") if path.is_file()] == []


def test_s3_targets_are_checked_and_left_empty_and_a_missing_bucket_gives_78(
    tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    with s3_server.running_s3("moto") as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        bucket = s3_server.make_bucket(*server, "preflight-test")
        write_corpus(f"{bucket}/corpus", [20, 10], endpoint_url=server.endpoint_url)
        settings = {
            "data.corpus": f"{bucket}/corpus",
            "data.heldout": None,
            "data.endpoint_url": server.endpoint_url,
            "checkpoint.targets": [f"{bucket}/checkpoints"],
            "checkpoint.endpoint_url": server.endpoint_url,
        }
        config = tiny_config("run", **settings)
        fit = run(config, "--json")
        assert fit.returncode == 0, fit.stdout
        whats = [what for _, what in findings(fit)]
        assert f"clock agrees with {server.endpoint_url}" in whats
        assert open_store(f"{bucket}/checkpoints", server.endpoint_url).list() == []
        refused = run(config, "--json", "--set", f"checkpoint.targets=['{bucket}-none/checkpoints']")
        assert refused.returncode == 78
        (wrong,) = [what for severity, what in findings(refused) if severity == "user error"]
        assert "preflight-test-none" in wrong


def test_storage_that_does_not_answer_gives_78_without_long_retries(tiny_config: Callable[..., Path]):
    config = tiny_config(
        "run", **{"data.corpus": "s3://bucket/corpus", "data.heldout": None, "data.endpoint_url": "http://127.0.0.1:9"}
    )
    done = run(config, "--json", AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="y", AWS_DEFAULT_REGION="us-east-1")
    assert done.returncode == 78
    (wrong,) = [what for severity, what in findings(done) if severity == "user error"]
    assert "s3://bucket/corpus" in wrong


def test_a_node_of_several_is_checked_for_the_cache_that_its_ranks_will_have(
    tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    """Without Slurm, a supervisor passes the number of nodes; ranks of several nodes cache on each node's own disk."""
    for name in ("WORLD_SIZE", "SLURM_NNODES"):
        monkeypatch.delenv(name, raising=False)
    checked: list[Path] = []
    monkeypatch.setattr(preflight, "check_node", lambda config, *_: checked.append(config.cache_folder) or [])
    config = tiny_config("run", **{"data.corpus": "s3://bucket/corpus", "data.heldout": None})
    for num_nodes in ("1", "2"):
        assert main(["--config", str(config), "--nodes", num_nodes]) == 0
    on_own_disk = choose_cache_folder(None, Path("not used"), has_several_nodes=True).path
    assert checked == [config.with_suffix("") / "cache", on_own_disk]


def test_check_node_returns_the_findings_of_the_node(tiny_config: Callable[..., Path]):
    from electra_dist.config.load import load_config

    node_findings = preflight.check_node(load_config(tiny_config()), "n7")
    assert {finding.node for finding in node_findings} == {"n7"}
    assert {finding.severity for finding in node_findings} == {"ok"}


def test_without_a_wait_for_storage_preflight_writes_no_heartbeat(tiny_config: Callable[..., Path]):
    config = tiny_config()
    assert main(["--config", str(config), "--storage-patience", "60"]) == 0
    assert not (config.with_suffix("") / "heartbeats").exists()


def test_a_wait_for_storage_is_a_heartbeat_of_the_nodes_first_rank(
    tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    """Check that `electra-dist status` can show why a run that has not begun does nothing."""
    config = tiny_config("waits")
    run_dir = config.with_suffix("")
    waits: list[Beat] = []

    def away_until_recorded(path: Path, *, only_new: bool = False) -> contextlib.AbstractContextManager[IO[bytes]]:
        """Raise StoreAway until there is a heartbeat, keep the heartbeat, and then create the object."""
        waits.extend(read_heartbeats(run_dir))
        if not waits:
            raise StoreAway(f"{path.parent}: the service cannot be reached; check the endpoint URL")
        return replacing(path, only_new=only_new)

    monkeypatch.setattr("electra_dist.store.open_store.replacing", away_until_recorded)
    assert main(["--config", str(config), "--storage-patience", "60", "--first-rank", "3"]) == 0
    assert (waits[0].rank, waits[0].phase) == (3, "storage")
    assert "cannot be reached" in waits[0].reason
    (after,) = read_heartbeats(run_dir)
    assert (after.phase, after.reason) == ("setup", "")
