"""Install the package and run all its tests under each supported Python with each supported version of torch.

    make matrix                       # all, one after another: about 6 GB of disk and 20 minutes each
    nox -s "tests(3.13, newest)"      # one of them

An environment that passed is deleted, because a CUDA build of torch takes 5 GB; one that failed is kept in .nox/.
"""

import shutil
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = True

PINNED = "2.13.0"  # as in constraints.txt
PYTHON_AND_TORCH = [("3.11", "2.8.0"), ("3.11", PINNED), ("3.12", PINNED), ("3.13", PINNED), ("3.13", "newest")]


@nox.session
@nox.parametrize("python,torch", PYTHON_AND_TORCH, ids=[f"{python}, {torch}" for python, torch in PYTHON_AND_TORCH])
def tests(session: nox.Session, torch: str) -> None:
    """Run the tests; `torch` is a version, or "newest" for the newest release that pip finds."""
    pins = [line for line in Path("constraints.txt").read_text().splitlines() if not line.startswith("torch==")]
    constraints = Path(session.create_tmp()) / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n")
    session.install("torch" if torch == "newest" else f"torch=={torch}")
    session.install("-c", str(constraints), "-e", ".[finetune,test]")
    session.run(
        "python", "-c", "import sys, torch; print('Python', sys.version.split()[0], 'torch', torch.__version__)"
    )
    session.run("pytest", "-n", "4", "--dist", "loadfile", "--no-loadscope-reorder", *session.posargs)
    shutil.rmtree(session.virtualenv.location)
