"""Nothing reads tables by a thread of Arrow's, because one that holds an object of Python aborts a process that ends.

Arrow begins its threads when they are first needed and keeps them, so each test looks at a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from electra_dist.corpus.origins import SCHEMA, table_to_bytes

NUM_ROWS = 3000  # several batches
_WATCHED = """
import os, sys, threading
from pathlib import Path

def threads():
    "Return the names of the threads of this process, without the one in which jemalloc frees memory."
    names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    return [name for name in names if name != "jemalloc_bg_thd"]

number = 0
"""
_READ_INPUT = """
from electra_dist.corpus.inputs.find_inputs import find_inputs
from electra_dist.corpus.inputs.text_readers import DocumentStream
before = len(threads())
number = sum(1 for _ in DocumentStream(find_inputs([sys.argv[1]])))
"""
_READ_SIDE_FILE = """
import pyarrow
from electra_dist.corpus.origins import documents_of_rows, lines_of_document, lines_of_source
from electra_dist.corpus.origins import table_from_bytes
before = len(threads())
table = table_from_bytes(Path(sys.argv[1]).read_bytes())
rows = table.column("row").to_numpy()
lines = lines_of_source(table, "s") | lines_of_document(table, "7")
number = len(documents_of_rows(table, rows, lines))
"""
_COUNT_SOURCES = """
import numpy as np
from electra_dist.corpus.origins import table_from_bytes
from electra_dist.report.corpus_page import RowFigures, _add_sources
before = len(threads())
figures = RowFigures()
table = table_from_bytes(Path(sys.argv[1]).read_bytes())
_add_sources(figures, table, np.full(len(table), 5))
number = sum(figures.tokens_by_source.values()) // 5
"""
_REPORT = """
print(number, len(threads()) - before)
"""


def new_threads(code: str, path: Path) -> tuple[int, int]:
    """Return what a process that reads a file has counted in it, and how many threads it has at its end."""
    command = [sys.executable, "-c", _WATCHED + code + _REPORT, str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    number, threads = done.stdout.split()
    return int(number), int(threads)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_an_input_is_read_without_a_thread_of_arrows(tmp_path: Path, name: str) -> None:
    texts = [f"text {number} " * 20 for number in range(NUM_ROWS)]
    table = pyarrow.table({"text": texts, "id": range(NUM_ROWS)})
    if name == "a.parquet":
        pyarrow.parquet.write_table(table, tmp_path / name, compression="zstd")
    else:
        options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
        with pyarrow.ipc.new_stream(tmp_path / name, table.schema, options=options) as stream:
            stream.write_table(table, max_chunksize=1000)

    assert new_threads(_READ_INPUT, tmp_path / name) == (NUM_ROWS, 0)


@pytest.mark.parametrize("code", [_READ_SIDE_FILE, _COUNT_SOURCES])
def test_a_side_file_is_read_and_counted_without_a_thread_of_arrows(tmp_path: Path, code: str) -> None:
    rows = range(NUM_ROWS)
    columns = [rows, [0] * NUM_ROWS, ["f"] * NUM_ROWS, rows, ["s"] * NUM_ROWS, [str(row) for row in rows]]
    columns.append([None] * NUM_ROWS)
    path = tmp_path / "a.parquet"
    path.write_bytes(table_to_bytes(pyarrow.table(dict(zip(SCHEMA.names, columns, strict=True)), schema=SCHEMA)))

    assert new_threads(code, path) == (NUM_ROWS, 0)
