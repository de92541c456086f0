"""Check that the packages of a run are packed once, and unpacked on a node's own disk completely or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from electra_launcher.slurm.batch_script import JobOptions, Submission, batch_script
from electra_launcher.slurm.submit import OWN_PACKAGES, archive_name, environment_files, write_archive

from electra_dist.config.load import load_config

CONFIG = load_config(Path(__file__).parents[3] / "configs" / "large_25pct_mask.yaml")


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Path of the archive of an environment with one package, `staged_package`, whose VERSION is 3."""
    package = tmp_path / "site-packages" / "staged_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("VERSION = 3\n")
    (package / "it's data.txt").write_text("x")
    files = environment_files([package.parent], packages=())
    file = tmp_path / "shared folder" / archive_name(files)
    write_archive(file, files)
    return file


def stage(archive: Path, node_disk: Path, program: str = "") -> subprocess.CompletedProcess[str]:
    """Run the batch script as on a node, and return the ended process with its output.

    Args:
        archive: path of the archive.
        node_disk: folder that simulates the node's own disk; it is created if it is missing.
        program: Python program to run in place of the supervisor; "" prints PYTHONPATH.
    """
    node_disk.mkdir(exist_ok=True)
    folder = archive.parent
    folder.mkdir(exist_ok=True)
    action = f"{sys.executable} -c '{program}'" if program else 'echo "$PYTHONPATH"'
    (folder / "python").write_text(f"#!/bin/bash\n{action}\n")
    (folder / "python").chmod(0o755)
    submission = Submission(
        options=JobOptions(num_nodes=1, gpus_per_node=0),
        config=CONFIG.model_copy(update={"run_dir": str(folder / "run")}),
        command="electra-dist submit",
        work_dir=str(folder),
        python=str(folder / "python"),
        environment_archive=str(archive),
    )
    (folder / "script.sh").write_text(batch_script(submission))
    environment = {"PATH": os.environ["PATH"], "SLURM_TMPDIR": str(node_disk), "SLURMD_NODENAME": "n1"}
    environment["session"] = "job-7-0"
    command = ["bash", str(folder / "script.sh"), "node"]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_the_ranks_of_a_node_import_from_its_own_disk(archive: Path, tmp_path: Path) -> None:
    node_disk = tmp_path / "node disk"
    program = "import staged_package as s; print(s.VERSION, s.__file__)"
    done = stage(archive, node_disk, program)
    version, file = done.stdout.strip().split(" ", 1)
    assert version == "3", done.stderr
    assert file.startswith(str(node_disk)), done.stderr
    archive.unlink()  # The second start on the node does not read it.
    assert stage(archive, node_disk, program).stdout == done.stdout


@pytest.mark.parametrize("content", [None, b"no archive"])
def test_without_a_whole_copy_the_shared_packages_are_used(
    archive: Path, tmp_path: Path, content: bytes | None
) -> None:
    if content is None:
        archive.unlink()
    else:
        archive.write_bytes(content)
    done = stage(archive, tmp_path / "node")
    assert done.returncode == 0
    assert done.stdout.strip() == ""
    (folder,) = (tmp_path / "node").iterdir()
    assert list(folder.iterdir()) == []
    assert folder.stat().st_mode & 0o077 == 0


def test_a_changed_environment_has_another_archive_and_an_equal_one_is_not_packed_again(
    archive: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "site-packages"
    files = environment_files([folder], packages=())
    assert archive_name(files) == archive.name
    before = archive.stat()
    write_archive(archive, files)
    assert (archive.stat().st_ino, archive.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    (folder / "staged_package" / "__init__.py").write_text("VERSION = 33\n")
    assert archive_name(environment_files([folder], packages=())) != archive.name


def test_the_own_packages_are_packed_wherever_they_are_installed() -> None:
    names = {packed.name for packed in environment_files([], OWN_PACKAGES)}
    wanted = {"electra_dist/config/config.py", "electra_launcher/pretrain.py", "electra_kernels/keyed_random.py"}
    assert wanted <= names


@pytest.mark.parametrize("planted", ["link", "other mode", "other user"])
def test_code_in_a_folder_that_another_user_could_have_made_is_not_imported(
    archive: Path, tmp_path: Path, planted: str
) -> None:
    """The name of the folder follows from the user's number, and that of the environment in it from its archive."""
    node_disk, elsewhere = tmp_path / "node", tmp_path / "elsewhere"
    folder = node_disk / f"electra-dist-environments-{os.getuid()}"
    node_disk.mkdir()
    code = (elsewhere if planted == "link" else folder) / archive.stem / "staged_package"
    code.mkdir(parents=True)
    (code / "__init__.py").write_text("VERSION = 666\n")
    code.parent.parent.chmod(0o777 if planted == "other mode" else 0o700)
    if planted == "link":
        folder.symlink_to(elsewhere)
    if planted == "other user":
        if os.getuid() != 0:
            pytest.skip("only root can give a folder to another user")
        os.chown(folder, 65534, 65534)
    done = stage(archive, node_disk)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""  # PYTHONPATH
    assert "is not private" in done.stdout
