"""Compile every Triton kernel for A100, H200 and B200 with every version of Triton since 3.4, without a GPU.

    python benchmarks/kernel_versions.py --save            # all versions that pip offers: about 20 minutes on a core
    python benchmarks/kernel_versions.py --versions 3.9.0  # one version; nothing is written

Guarantee: each version compiles with its own compiler and its own assembler (ptxas), both from its wheel. The exit
code is 1 if a version refuses a kernel, or if a kernel spills registers.

How: pip unpacks each wheel into a folder of its own, which stands first on the search path of a process that runs
`electra_kernels.triton.compile_without_gpu`. Torch is that of this environment; the compiler does not use it.
`--save` writes benchmarks/results/kernel_versions-YYYYMMDD.json and the table in docs/kernels.md.

Cost: 0.6 GB on the disk for each version. Limits: nothing is launched, so values and times are not tested.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from measure import REPOSITORY, RESULTS, Json, finish

OLDEST = (3, 4)  # the oldest version of Triton that setup.py accepts
PAGE = REPOSITORY / "docs" / "kernels.md"
BEGIN, END = "<!-- registers: written by benchmarks/kernel_versions.py -->", "<!-- end of registers -->"


def offered_versions() -> list[str]:
    """Return the released versions of Triton since `OLDEST` that pip offers for this Python, oldest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", "triton"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"Available versions: (.*)", printed)
    assert found, f"pip printed no list of versions: {printed!r}; name them by --versions"
    return sorted((version for version in found[1].split(", ") if _numbers(version) >= OLDEST), key=_numbers)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, such as (3, 5, 1)."""
    return tuple(int(number) for number in version.split("."))


def unpack(version: str, folder: Path) -> Path:
    """Install one version of Triton, without its requirements, into a folder of its own; return that folder."""
    target = folder / f"triton-{version}"
    if not target.exists():
        unfinished = folder / f"unfinished-{version}"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        subprocess.run([*command, "--target", str(unfinished), f"triton=={version}"], check=True)
        unfinished.rename(target)
    return target


def assemblers(package: Path) -> dict[str, str]:
    """Return the release of each ptxas in an unpacked Triton, such as {"ptxas": "12.8"}."""
    release_by_name = {}
    for program in sorted((package / "triton" / "backends" / "nvidia" / "bin").glob("ptxas*")):
        printed = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=True).stdout
        found = re.search(r"release ([\d.]+)", printed)
        release_by_name[program.name] = found[1] if found else "unknown"
    return release_by_name


def compile_all(package: Path, folder: Path) -> list[Json]:
    """Return the rows of `electra_kernels.triton.compile_without_gpu` for an unpacked version of Triton.

    A row has name, dtype, arch and either the resources or, where the compiler refuses the kernel, `error`.

    Args:
        package: folder from `unpack`.
        folder: where the process may write.

    Raises:
        RuntimeError: the process ended without rows, for example because this version cannot be imported.
    """
    rows_file = folder / f"{package.name}.json"
    rows_file.unlink(missing_ok=True)
    search_path = [str(package), str(REPOSITORY / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(part for part in search_path if part),
        "TRITON_CACHE_DIR": str(folder / f"cache-{package.name}"),
    }
    environment.pop("TRITON_INTERPRET", None)
    command = [
        sys.executable,
        "-m",
        "electra_kernels.triton.compile_without_gpu",
        "--all-dtypes",
        "--json",
        str(rows_file),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if not rows_file.exists():
        raise RuntimeError(f"{package.name}: compiling ended with exit code {done.returncode}: {done.stderr[-2000:]}")
    rows: list[Json] = json.loads(rows_file.read_text())
    return rows


def page_table(record: Json) -> str:
    """Return the Markdown table of a record: least and most registers, spills and shared memory over all versions.

    A line has a kernel and a dtype. A kernel that some version refuses has the versions in place of the numbers.
    """
    architectures = sorted({row["arch"] for row in record["rows"]})
    rows_of_kernel: dict[tuple[str, str], list[Json]] = defaultdict(list)
    for row in record["rows"]:
        rows_of_kernel[row["name"], row["dtype"]].append(row)
    titles = ["kernel", "dtype", *(f"registers, sm_{arch}" for arch in architectures), "spilled bytes", "shared bytes"]
    lines = [_page_row(titles), _page_row(["---", "---", *["--:"] * (len(titles) - 2)])]
    for (name, dtype), rows in rows_of_kernel.items():
        registers = [_range([row for row in rows if row["arch"] == arch], "registers") for arch in architectures]
        lines.append(_page_row([name, dtype, *registers, _range(rows, "stack_bytes"), _range(rows, "shared_bytes")]))
    versions = ", ".join(
        f"{version} ({' and '.join(dict.fromkeys(releases.values()))})"
        for version, releases in record["assemblers"].items()
    )
    return f"Compiled on {record['date'][:10]} with Triton {versions}; in brackets the ptxas.\n\n" + "\n".join(lines)


def _page_row(cells: Sequence[str]) -> str:
    """Return one line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def _range(rows: Sequence[Json], column: str) -> str:
    """Return the least and the most of a column as text, or the versions that refuse the kernel."""
    refusing = sorted({row["triton"] for row in rows if "error" in row}, key=_numbers)
    if refusing:
        return f"refused by {', '.join(refusing)}"
    least = min(row[column] for row in rows)
    most = max(row[column] for row in rows)
    return str(least) if least == most else f"{least} to {most}"


def rewrite(text: str, record: Json) -> str:
    """Return the page `text` with the table of a record between its two markers, `BEGIN` and `END`.

    Raises:
        ValueError: A marker is missing from the page.
    """
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:begin]}\n{page_table(record)}\n{text[end:]}"


def write_record(record: Json, folder: Path) -> Path:
    """Write a record with one row of its table a line; return the file."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in record["rows"])
    head = json.dumps({key: value for key, value in record.items() if key != "rows"}, indent=1)
    file = folder / f"kernel_versions-{record['date'][:10].replace('-', '')}.json"
    file.write_text(head.removesuffix("\n}") + f',\n "rows": [\n{rows}\n ]\n}}\n')
    return file


def faults(rows: Sequence[Json]) -> list[str]:
    """Return one line for each kernel that a version refuses or that spills registers."""
    lines = []
    for row in rows:
        subject = f"triton {row['triton']}, sm_{row['arch']}: {row['name']} {row['dtype']}"
        if "error" in row:
            lines.append(f"{subject}: {row['error']}")
        elif row["stack_bytes"]:
            lines.append(f"{subject} spills: {row['stack_bytes']} bytes of stack")
    return lines


def main(argv: Sequence[str] | None = None) -> Json:
    """Compile with all versions, print what is wrong, and write record and page if `--save` is set."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--save", action="store_true", help="write the record and the table in docs/kernels.md")
    options.add_argument("--versions", nargs="+", help="versions of Triton (default: all since 3.4 that pip offers)")
    options.add_argument(
        "--folder", type=Path, default=REPOSITORY / "build" / "triton", help="where wheels are unpacked and kept"
    )
    arguments = options.parse_args(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rows: list[Json] = []
    assemblers_of_version = {}
    for version in arguments.versions or offered_versions():
        package = unpack(version, arguments.folder)
        assemblers_of_version[version] = assemblers(package)
        compiled = [{"triton": version, **row} for row in compile_all(package, arguments.folder)]
        rows += compiled
        print(f"triton {version}: {len(compiled)} kernels, {len(faults(compiled))} faults", flush=True)
    by_this_script = argparse.Namespace(smoke=False, save=None)
    record = finish("kernel_versions", by_this_script, argv, [], assemblers=assemblers_of_version, rows=rows)
    if arguments.save:
        print(f"wrote {write_record(record, RESULTS)}")
        PAGE.write_text(rewrite(PAGE.read_text(), record))
    for line in faults(rows):
        print(line)
    return record


if __name__ == "__main__":
    sys.exit(1 if faults(main()["rows"]) else 0)
