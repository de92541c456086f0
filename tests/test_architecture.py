"""The packages stand in layers: `docs/layers.md` has the table, the import statements of all sources keep to it.

`python tests/support/import_graph.py` prints the figures of the same graph.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest
from support.import_graph import (
    LAYERS_FILE,
    ROOT,
    SMALL_MODULE,
    FileLines,
    Graph,
    count_lines,
    cycles,
    docstring_shares,
    file_imports,
    files_per_folder,
    imported_names,
    only_importers,
    package_imports,
    package_of,
    reachable,
    read_layers,
    upward_imports,
)

from electra_dist.run import folder

LARGEST_FOLDER = 20
LONGEST_FILE = 500
DOCSTRING_SHARE = 0.30  # docstring lines per line of code
DOCSTRING_SHARES = {"electra_dist/objectives": 0.40, "kernels/electra_kernels": 0.40}  # formulas, shapes, sources
# These two numbers only fall. CONTRIBUTING.md has the rules that they count exceptions from.
SMALL_MODULES = 0
SMALL_FOLDERS = 2
WITHOUT_TORCH = (
    "electra_dist.train.check_inputs",
    "electra_launcher.cli.runs",
    "electra_launcher.slurm.submit",
    "electra_launcher.slurm.job",
    "electra_launcher.slurm.batch_script",
    "electra_launcher.supervise.__main__",
    "electra_launcher.preflight.__main__",
    "electra_launcher.cli.run_facts",
    "electra_launcher.cli.status",
    "electra_launcher.cli.main",
)
_TELL_TORCH = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    for heavy in ("torch", "deepspeed"):
        if heavy in sys.modules:
            sys.exit(f"{name} imports {heavy}")
"""


@pytest.fixture(scope="module")
def files() -> Graph:
    return file_imports()


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / LAYERS_FILE).read_text(encoding="utf-8")


@pytest.fixture
def tree(tmp_path: Path) -> Callable[..., Graph]:
    """`tree({"electra_dist/config/config.py": "import os"})`: the imports of a source tree with just these files."""

    def make(sources: dict[str, str]) -> Graph:
        for name, text in sources.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return file_imports(tmp_path)

    return make


def test_no_package_and_no_file_imports_itself_through_others(files: Graph):
    assert cycles(package_imports(files)) == []
    assert cycles(files) == []


def test_every_package_stands_in_the_table_once(files: Graph, page: str):
    listed = Counter(name for _, name in read_layers(page))
    assert set(listed) == {package_of(file) for file in files}
    assert [name for name, count in listed.items() if count > 1] == []


def test_the_table_begins_with_the_lowest_layer(page: str):
    layers = [layer for layer, _ in read_layers(page)]
    assert layers == sorted(layers)


def test_packages_import_from_lower_layers_only(files: Graph, page: str):
    layers = {name: layer for layer, name in read_layers(page)}
    assert upward_imports(files, layers) == []


def test_library_and_kernels_know_nothing_of_what_is_above_them(files: Graph):
    def imports(importing: str, imported: tuple[str, ...]) -> list[tuple[str, str]]:
        return [
            (file, target)
            for file, targets in files.items()
            for target in targets
            if file.startswith(importing) and target.startswith(imported)
        ]

    assert imports("electra_dist/", ("launcher/", "benchmarks/")) == []
    assert imports("kernels/", ("electra_dist/", "launcher/", "benchmarks/")) == []


def test_only_the_store_waits_for_storage(files: Graph):
    above = (file for file in files if not file.startswith(("electra_dist/store/", "benchmarks/")))
    assert [file for file in above if "patience.call(" in (ROOT / file).read_text(encoding="utf-8")] == []


def test_nothing_inside_imports_from_the_top_of_the_library(files: Graph):
    assert [file for file, targets in files.items() if "electra_dist/__init__.py" in targets] == []


def test_data_never_comes_to_torch_distributed(files: Graph):
    data = [file for file in files if file.startswith("electra_dist/data/")]
    assert data
    for file in {*data, *reachable(files, data)}:
        distributed = [name for name in imported_names(ROOT, file) if f"{name}.".startswith("torch.distributed.")]
        assert distributed == [], file


def test_no_folder_has_too_many_files(files: Graph):
    counts = files_per_folder(file for file in files if not file.startswith("benchmarks/"))
    assert {name: n for name, n in counts.items() if n > LARGEST_FOLDER} == {}


def test_no_file_is_too_long(files: Graph):
    assert [file for file in files if count_lines(ROOT, file).all > LONGEST_FILE] == []


def test_docstrings_say_what_signatures_cannot(files: Graph):
    shares = docstring_shares(ROOT, (file for file in files if not file.startswith("benchmarks/")))
    assert {p: share for p, share in shares.items() if share > DOCSTRING_SHARES.get(p, DOCSTRING_SHARE)} == {}


def test_no_new_small_module_has_one_importer(files: Graph):
    alone = (module for module in only_importers(files) if not module.startswith("benchmarks/"))
    assert len([module for module in alone if count_lines(ROOT, module).code < SMALL_MODULE]) <= SMALL_MODULES


def test_no_new_sub_package_is_small(files: Graph):
    modules = [file for file in files if file.count("/") > 2 and not file.endswith("__init__.py")]
    counts = files_per_folder(file for file in modules if str(PurePosixPath(file).parent) != package_of(file))
    assert len([folder for folder, count in counts.items() if count < 4]) <= SMALL_FOLDERS


def test_what_notebooks_use_imports_no_deepspeed_which_prints_warnings(files: Graph) -> None:
    used = ["electra_dist/api.py", *reachable(files, ["electra_dist/api.py"])]
    names = {name.split(".")[0] for file in used for name in imported_names(ROOT, file)}
    assert "torch" in names and "deepspeed" not in names


@pytest.mark.real_start
def test_what_runs_on_a_login_node_or_beside_the_ranks_is_imported_without_torch_and_deepspeed():
    done = subprocess.run(
        [sys.executable, "-c", _TELL_TORCH, *WITHOUT_TORCH], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_the_pages_name_what_there_is():
    """Every path that the pages give exists, and every function that they give for a file is defined there."""
    names = ("architecture", "layers", "walkthrough")
    page = "".join((ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in names)
    for path in re.findall(r"`((?:benchmarks|electra_dist|kernels|launcher|tests)/[^` ]*)`", page):
        assert (ROOT / path).exists(), path
    rows = re.findall(r"^\| `([^`]+\.py)` \| ((?:`[\w.]+`(?:, )?)+) \|", page, re.MULTILINE)
    assert len(rows) > 40
    for path, cell in rows:
        text = (ROOT / path).read_text(encoding="utf-8")
        for name in re.findall(r"`([\w.]+)`", cell):
            for part in name.split("."):
                assert re.search(rf"^ *(def|class) {part}\b", text, re.MULTILINE), f"{path} has no {name}"


def test_the_page_of_the_run_folder_has_every_file():
    page = (ROOT / "docs" / "run-folder.md").read_text(encoding="utf-8")
    names = {value for key, value in vars(folder).items() if key.endswith(("_FILE", "_DIR"))}
    assert len(names) > 10
    assert [name for name in sorted(names) if f"`{name}" not in page] == []


# The test of the tests: what is planted is found, in whatever spelling.

LAYERS = {"kernels/electra_kernels": (1, ""), "electra_dist/store": (2, ""), "electra_dist/train": (5, "")}
UPWARD = {
    "in a function": "def f():\n    from electra_dist.train.step import g\n",
    "for types only": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import electra_dist.train.step\n",
    "a module by its package": "from electra_dist.train import step\n",
    "relative": "from ..train.step import g\n",
    "relative module": "from ..train import step as s\n",
}


@pytest.mark.parametrize("statement", UPWARD.values(), ids=UPWARD)
def test_a_planted_upward_import_is_found(tree: Callable[..., Graph], statement: str):
    found = tree({"electra_dist/store/local_store.py": statement, "electra_dist/train/step.py": "def g(): ..."})
    assert upward_imports(found, LAYERS) == [
        "electra_dist/store/local_store.py (layer 2) imports electra_dist/train/step.py (5)"
    ]


def test_an_import_within_a_layer_is_found(tree: Callable[..., Graph]):
    found = tree(
        {
            "launcher/electra_launcher/slurm/job.py": "from electra_launcher.chaos import drill",
            "launcher/electra_launcher/chaos/drill.py": "",
        }
    )
    parts = {"launcher/electra_launcher/slurm": (7, "a"), "launcher/electra_launcher/chaos": (7, "a")}
    assert len(upward_imports(found, parts)) == 1
    assert upward_imports(found, {**parts, "launcher/electra_launcher/slurm": (7, "b")}) == []


def test_the_installed_name_of_the_kernels_is_resolved(tree: Callable[..., Graph]):
    found = tree(
        {
            "kernels/electra_kernels/__init__.py": "class E: ...",
            "kernels/electra_kernels/native/cpu_library.py": "",
            "electra_dist/store/local_store.py": (
                "from electra_kernels import E\nfrom electra_kernels.native import cpu_library\n"
            ),
        }
    )
    assert found["electra_dist/store/local_store.py"] == {
        "kernels/electra_kernels/__init__.py",
        "kernels/electra_kernels/native/cpu_library.py",
    }


def test_planted_cycles_are_found(tree: Callable[..., Graph]):
    found = tree(
        {
            "electra_dist/store/local_store.py": "from electra_dist.train import step",
            "electra_dist/store/atomic_files.py": "",
            "electra_dist/train/step.py": "import electra_dist.store.atomic_files",
            "launcher/electra_launcher/cli/main.py": "from electra_launcher.cli import status",
            "launcher/electra_launcher/cli/status.py": "def f():\n    from electra_launcher.cli.main import app",
        }
    )
    assert cycles(package_imports(found)) == [["electra_dist/store", "electra_dist/train"]]
    assert cycles(found) == [["launcher/electra_launcher/cli/main.py", "launcher/electra_launcher/cli/status.py"]]


def test_layers_are_read_from_a_table():
    text = "| layer | packages |\n|---|---|\n| 1 | `electra_dist/a.py`: x; `electra_dist/b/` |\n| 7b | `launcher/c/` |"
    assert read_layers(text) == [
        ((1, ""), "electra_dist/a.py"),
        ((1, ""), "electra_dist/b"),
        ((7, "b"), "launcher/c"),
    ]


COUNTED = '''"""A module.

Two more lines of docstring, and a blank one.
"""

# A comment.
import os


class A:
    """A class."""

    x = """no docstring"""

    def f(self):
        """A function."""
        return "a", """
        b"""
'''


def test_lines_are_counted_as_code_docstring_or_neither(tmp_path: Path):
    (tmp_path / "a.py").write_text(COUNTED)
    assert count_lines(tmp_path, "a.py") == FileLines(all=18, code=6, docstring=6)


def test_modules_beside_packages_count_together(tmp_path: Path):
    names = ("electra_dist/a.py", "electra_dist/b.py", "electra_dist/store/c.py")
    (tmp_path / "electra_dist/store").mkdir(parents=True)
    for name, text in zip(names, ('"""A."""\nx = 1\n', "x = 1\n", '"""C."""\nx = 1\n')):
        (tmp_path / name).write_text(text)
    assert docstring_shares(tmp_path, names) == {"electra_dist/*.py": 0.5, "electra_dist/store": 1.0}


def test_a_module_with_one_importer_is_found(tree: Callable[..., Graph]):
    found = tree(
        {
            "electra_dist/store/local_store.py": "from electra_dist.store import s3, files",
            "electra_dist/store/open_store.py": "from electra_dist.store import files",
            "electra_dist/store/s3.py": "",
            "electra_dist/store/files.py": "",
        }
    )
    assert only_importers(found) == {"electra_dist/store/s3.py": "electra_dist/store/local_store.py"}
