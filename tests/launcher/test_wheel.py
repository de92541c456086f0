"""The wheel has all that a user needs: it is built, installed in a new environment and used outside the repository."""

from __future__ import annotations

import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from support.installed_wheel import Installation
from support.real_runs import REPOSITORY, free_port, step_records, write_corpus, write_tiny_config

from electra_dist.version import VERSION


@pytest.mark.sample
def test_the_wheel_has_every_module_and_config_and_its_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata_name,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(metadata_name).decode())
    wanted = {f"electra_dist/{file.relative_to(REPOSITORY)}" for file in (REPOSITORY / "configs").rglob("*.yaml")}
    for place, package in (("", "electra_dist"), ("kernels", "electra_kernels"), ("launcher", "electra_launcher")):
        sources = (file for file in (REPOSITORY / place / package).rglob("*") if file.suffix in (".py", ".sh", ".cu"))
        wanted |= {str(file.relative_to(REPOSITORY / place)) for file in sources}
    assert wanted | {"electra_dist/py.typed"} <= names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert metadata["Version"] == VERSION and metadata["License"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown" and "# electra-dist" in metadata.get_payload()
    assert metadata.get_all("Project-URL")
    pythons = [line for line in metadata.get_all("Classifier", []) if "Python :: 3." in line]
    assert pythons == [f"Programming Language :: Python :: {version}" for version in ("3.11", "3.13")]


@pytest.mark.sample
def test_the_installed_commands_run_outside_the_repository(installed: Installation) -> None:
    before = set(installed.cwd.iterdir())  # another test's, which had the same installation
    version = installed.run("electra-dist", "--version")
    assert (version.returncode, version.stdout) == (0, f"electra-dist {VERSION}\n"), version.stderr
    shown = installed.run("electra-dist", "config", "configs/small.yaml")
    assert str(installed.package / "configs" / "defaults.yaml") in shown.stdout, shown.stderr
    assert str(REPOSITORY) not in shown.stdout
    supervise = installed.run("python", "-m", "electra_launcher.supervise", "--config", "configs/nowhere.yaml")
    assert supervise.returncode == 78 and "configs/nowhere.yaml: no such config file" in supervise.stderr
    plan = installed.run(
        "python", "-m", "electra_launcher.pretrain", "--config", "configs/large_25pct_mask.yaml", "--dry-run"
    )
    assert plan.returncode == 0 and "354.66 M" in plan.stdout, plan.stderr
    assert set(installed.cwd.iterdir()) == before


@pytest.mark.drill
def test_the_installed_package_trains_under_deepspeed_and_under_the_supervisor(
    installed: Installation, tmp_path: Path
) -> None:
    write_corpus(str(tmp_path / "corpus"), [70, 33])
    project = tmp_path / "project"  # with folders of its own that have the names of folders of the repository
    for name in ("launcher", "kernels", "configs"):
        (project / name).mkdir(parents=True)
        (project / name / "__init__.py").write_text("raise RuntimeError('this is the project of a user')\n")
    deepspeed = (
        "python",
        "-m",
        "deepspeed.launcher.runner",
        "--num_gpus",
        "1",
        "--master_port",
        str(free_port()),
        "--module",
        "electra_launcher.pretrain",
    )
    for number, command in enumerate((deepspeed, ("python", "-m", "electra_launcher.supervise"))):
        run_dir = tmp_path / f"run-{number}"
        settings = {"data.heldout": None, "train.num_steps": 3}
        config = write_tiny_config(tmp_path / f"{number}.yaml", run_dir, str(tmp_path / "corpus"), **settings)
        done = installed.run(*command, "--config", config, cwd=project, timeout=300)
        assert done.returncode == 0, done.stderr
        assert len(step_records(run_dir)) == 3
