"""Builds and samples delete and replace files of their own only; those of the user stay as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.folder_contents import file_contents

from electra_dist.corpus.builder.build_corpus import build_corpus
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.index_shards import index_corpus
from electra_dist.data.shard import write_shard
from electra_dist.errors import UserError
from electra_dist.store.open_store import open_store
from electra_dist.tokenizer import Vocabulary

RequestFactory = Callable[..., BuildRequest]
NAMES = ["progress/thesis.txt", "progress/groups/notes.json", "progress/spills/mine", "progress/parts/todo"]


def write_mine(folder: Path, names: list[str]) -> dict[str, bytes]:
    """Write files of the user into a folder, and return their contents by name."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"mine")
    return dict.fromkeys(names, b"mine")


def test_a_finished_build_deletes_its_own_records_only(build_request: RequestFactory, inputs: list[Path]) -> None:
    request = build_request(inputs, heldout_fraction=0.1)
    mine = write_mine(Path(request.output), NAMES)
    build_corpus(request)
    found = file_contents(Path(request.output))
    assert {name: found.get(name) for name in mine} == mine
    assert {name for name in found if name.startswith("progress/")} == set(mine)


def test_a_build_without_usable_text_leaves_the_vocabulary_that_was_there(
    build_request: RequestFactory, tmp_path: Path, vocabulary: Vocabulary
) -> None:
    (tmp_path / "empty.txt").write_text("\n\n")
    request = build_request([tmp_path / "empty.txt"])
    folder = Path(request.output)
    with pytest.raises(UserError):
        build_corpus(request)
    assert not (folder / "vocab.txt").exists()  # the build had written it
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text(vocabulary.text)
    with pytest.raises(UserError):
        build_corpus(request)
    assert (folder / "vocab.txt").read_text() == vocabulary.text


def test_another_vocabulary_in_the_output_is_never_replaced(
    build_request: RequestFactory, inputs: list[Path], tmp_path: Path, vocabulary: Vocabulary
) -> None:
    request = build_request(inputs)
    folder = Path(request.output)
    folder.mkdir(exist_ok=True)
    for text in (vocabulary.text + "more\n", "my own notes\n"):
        (folder / "vocab.txt").write_text(text)
        with pytest.raises(UserError, match=r"vocab\.txt: .*another --output") as error:
            build_corpus(request)
        assert "\n" not in str(error.value)
        assert file_contents(folder) == {"vocab.txt": text.encode()}
    rows = np.full((4, 16), vocabulary.special["[CLS]"], np.uint16)
    (tmp_path / "theirs").mkdir()
    with (tmp_path / "theirs" / "a.tar").open("wb") as out:
        write_shard(out, rows, block_rows=4)
    (tmp_path / "theirs" / "vocab.txt").write_text(vocabulary.text + "more\n")
    with pytest.raises(UserError, match=r"vocab\.txt: "):
        index_corpus(open_store(str(tmp_path / "theirs")), vocabulary, lowercase=True)
    assert (tmp_path / "theirs" / "vocab.txt").read_text() == vocabulary.text + "more\n"
    assert not (tmp_path / "theirs" / "corpus.json").exists()


def test_a_vocabulary_with_other_line_ends_counts_as_the_same(
    build_request: RequestFactory, inputs: list[Path], vocabulary: Vocabulary
) -> None:
    request = build_request(inputs)
    folder = Path(request.output)
    folder.mkdir(exist_ok=True)
    content = vocabulary.text.replace("\n", "\r\n").encode()
    (folder / "vocab.txt").write_bytes(content)
    built = build_corpus(dataclasses.replace(request, vocabulary=Vocabulary.read(folder / "vocab.txt")))
    assert (folder / "vocab.txt").read_bytes() == content
    assert built.manifest.tokenizer.sha256 == vocabulary.sha256
