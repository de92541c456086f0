"""A part of the product whose packages are missing says in one line what to install."""

from __future__ import annotations

import shlex
import subprocess
import sys
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement

from electra_dist.errors import missing_packages


@pytest.mark.parametrize(
    ("extra", "some"), [("finetune", {"transformers", "scikit-learn", "scipy"}), ("corpus", {"datatrove", "warcio"})]
)
def test_the_command_names_every_package_of_the_extra_as_a_shell_reads_it(extra: str, some: set[str]) -> None:
    purpose, _, command = str(missing_packages("this part", extra)).partition("; run: pip install ")
    packages = [Requirement(word) for word in shlex.split(command)]
    assert purpose == "this part needs packages that are not installed"
    assert some <= {package.name for package in packages}
    assert "torch" not in {package.name for package in packages}
    # The tests run with the packages of every extra, so each name is that of a package, in a version that is allowed.
    assert all(package.specifier.contains(version(package.name)) for package in packages)


@pytest.mark.real_start
def test_finetuning_without_scipy_ends_with_the_command_that_installs_it() -> None:
    script = "import sys; sys.modules['scipy'] = None; import electra_dist.finetune.task_metrics"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (
        "UserError: fine-tuning needs packages that are not installed; run: pip install 'transformers" in done.stderr
    )
