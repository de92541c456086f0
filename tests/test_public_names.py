"""`import electra_dist`: what it offers, and that it imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

import electra_dist as ed

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "numpy", "pydantic", "deepspeed", "tokenizers", "matplotlib", "transformers", "yaml")
TELL_HEAVY = f"""
import sys
import electra_dist
dir(electra_dist)
print(*[name for name in {HEAVY} if name in sys.modules])
"""


@pytest.mark.real_start
def test_importing_the_package_imports_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", TELL_HEAVY], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_every_name_that_is_offered_exists_and_is_documented():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert dir(ed) == sorted(ed.__all__)
    for name in ed.__all__:
        value = getattr(ed, name)
        assert value is not None
        assert name == "__version__" or value.__name__ == name
        assert name == "__version__" or f"`ed.{name}" in page, name
    with pytest.raises(AttributeError, match="no attribute 'open_corpora'"):
        ed.open_corpora  # noqa: B018


@pytest.mark.parametrize("package", ["electra_dist", "electra_kernels", "electra_launcher"])
def test_the_packages_are_marked_as_typed(package: str):
    assert (files(package) / "py.typed").is_file()
    setup_py = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert f'"{package}": ["py.typed"]' in setup_py  # so that a wheel has the file
