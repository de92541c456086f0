"""The Dockerfile: its rules, and its RUN commands as far as they can be tried without an engine and a network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.real_runs import REPOSITORY

DOCKERFILE = REPOSITORY / "docker" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """(KEYWORD, rest) of each instruction, continued lines joined, comments dropped."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").split("\n")
    parts = [line.partition(" ") for line in joined if line.strip()]
    return [(word.upper(), rest.strip()) for word, _, rest in parts]


def of(keyword: str) -> list[str]:
    return [rest for word, rest in instructions() if word == keyword]


def test_hadolint_finds_nothing(tmp_path: Path):
    if not (hadolint := shutil.which("hadolint")):
        pytest.skip("hadolint is not on PATH; the other tests check the rules that matter most")
    home = {**os.environ, "HOME": str(tmp_path)}  # it ends with an error for a user without one
    done = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True, check=False, env=home)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_base_is_one_image_of_a_pinned_release():
    (base,) = of("FROM")
    assert re.fullmatch(r"nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3", base)


def test_only_files_that_exist_are_copied_and_nothing_is_fetched():
    assert of("ADD") == []
    copied = [source for rest in of("COPY") for source in rest.split()[:-1]]
    assert copied
    assert [source for source in copied if not (REPOSITORY / source).exists()] == []
    assert not [run for run in of("RUN") if re.search(r"\b(curl|wget|git)\b|https?://", run)]
    ignored = {"runs", "corpora", ".git", ".venv", "build", "."}
    assert not ignored & set(copied)


def test_apt_lists_are_not_left_in_a_layer_and_pip_keeps_no_cache():
    for run in of("RUN"):
        assert "apt-get install" not in run or "rm -rf /var/lib/apt/lists/*" in run
        assert "pip install" not in run or "--no-cache-dir" in run


def test_the_image_runs_as_a_user_that_it_makes_and_no_privilege_comes_after():
    words = [word for word, _ in instructions()]
    (user,) = of("USER")
    assert user not in ("root", "0")
    parts = [part for run in of("RUN") for part in re.split(r"\s*&&\s*", run)]
    assert [part for part in parts if re.fullmatch(rf"useradd .*--uid {user} .*", part)]
    assert not {"RUN", "COPY"} & set(words[words.index("USER") :])


@pytest.mark.parametrize("command", of("RUN"))
def test_each_run_command_is_sound_shell(command: str):
    done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_installation_takes_our_package_only_and_leaves_the_torch_of_the_base(tmp_path: Path):
    """The build's own command, offline, on exactly the files that the image gets.

    The base is this environment, with its torch turned into a build such as NVIDIA's: a pre-release with a local
    version, which no index has.
    """
    context, base = tmp_path / "context", tmp_path / "base"
    for rest in of("COPY"):
        *sources, target = rest.split()
        for source in sources:
            copy = shutil.copytree if (REPOSITORY / source).is_dir() else shutil.copy
            copy(REPOSITORY / source, _made(context / target / ("" if target == source else source)))  # type: ignore[operator]
    info = base / "torch-2.9.0a0+50eac811a6.nv25.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0a0+50eac811a6.nv25.9\n")
    (command,) = [run for run in of("RUN") if "pip install" in run]
    offline = "pip install --dry-run --no-index --no-build-isolation --disable-pip-version-check"
    command = command.replace("pip install", offline).replace("/tmp/constraints.txt", f"{tmp_path}/constraints.txt")
    command = command.replace(f"&& rm {tmp_path}/constraints.txt", "")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=context,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(base)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "Would install electra-dist-0.1.0"
    pins = (tmp_path / "constraints.txt").read_text().splitlines()
    assert [pin for pin in pins if pin.startswith("torch==")] == ["torch==2.9.0a0+50eac811a6.nv25.9"]


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def test_every_extra_that_the_image_installs_exists():
    (extras,) = re.findall(r"\.\[([\w,]+)\]", " ".join(of("RUN")))
    declared = re.search(r"EXTRAS = \{(.*?)\n\}", (REPOSITORY / "setup.py").read_text(), re.DOTALL)
    assert declared is not None
    assert [extra for extra in extras.split(",") if f'"{extra}":' not in declared[1]] == []


def test_constraints_keep_the_base_and_add_the_tested_versions_of_what_it_lacks():
    sys.path.insert(0, str(REPOSITORY / "docker"))
    try:
        from base_constraints import merged
    finally:
        sys.path.pop(0)
    tested = "# why\ntorch==2.13.0\nJinja2==3.1.6  # a comment\nast_serialize==0.13.1\n\n"
    base = {"torch": "2.9.0a0+nv", "jinja2": "3.0", "apex": "0.1"}
    assert merged(tested, base) == ["apex==0.1", "jinja2==3.0", "torch==2.9.0a0+nv", "ast_serialize==0.13.1"]
