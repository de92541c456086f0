"""Read what a folder holds, to compare it with another folder or with itself later."""

from __future__ import annotations

from pathlib import Path


def file_contents(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder by its relative path."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def finished_files(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder by its relative path, without .tmp files, which kills leave."""
    return {name: data for name, data in file_contents(folder).items() if not name.endswith(".tmp")}


def modification_times(paths: list[Path]) -> dict[Path, int]:
    """Return the modification time of each path, in nanoseconds."""
    return {path: path.stat().st_mtime_ns for path in paths}
