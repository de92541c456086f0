"""A build into a folder that holds a finished or a half-built corpus: it goes on, writes nothing, or is refused.

Fixtures: `inputs` is two JSON-lines files of random prose, and `build_request(inputs, output, ...)` returns a request
for rows of 64 ids in shards of about 40 kB.
"""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from support.folder_contents import file_contents, modification_times

from electra_dist.corpus.builder import worker_stages
from electra_dist.corpus.builder.build_corpus import Part, build_corpus, build_part
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.errors import ManifestMismatch, UserError
from electra_dist.tokenizer import Vocabulary

Prose = Callable[[int, int], list[str]]
JsonlFile = Callable[..., Path]
RequestFactory = Callable[..., BuildRequest]


def test_a_second_build_of_a_finished_corpus_writes_nothing(build_request: RequestFactory, inputs: list[Path]) -> None:
    request = build_request(inputs, heldout_fraction=0.1)
    folder = Path(request.output)
    first = build_corpus(request)
    times_before = modification_times(list(folder.rglob("*")))

    second = build_corpus(request)

    assert not first.was_finished
    assert second.was_finished
    assert second.manifest == first.manifest
    assert second.heldout == first.heldout
    assert modification_times(list(folder.rglob("*"))) == times_before


class BuildStopped(Exception):
    """Raised inside a build to end it, in place of a kill."""


@pytest.fixture
def half_built(build_request: RequestFactory, inputs: list[Path], monkeypatch: pytest.MonkeyPatch) -> BuildRequest:
    """The request of a build that ended after its first two shards; its output folder holds them."""
    request = build_request(inputs, heldout_fraction=0.1)
    make = worker_stages.RowMaker.__call__

    def make_two_shards(self, bucket):  # type: ignore[no-untyped-def]
        if bucket == 2:
            raise BuildStopped
        return make(self, bucket)

    with monkeypatch.context() as patch:
        patch.setattr(worker_stages.RowMaker, "__call__", make_two_shards)
        with pytest.raises(BuildStopped):
            build_corpus(request)
    return request


def test_a_stopped_build_keeps_its_shards_and_ends_with_the_bytes_of_an_unstopped_one(
    half_built: BuildRequest, build_request: RequestFactory, inputs: list[Path]
) -> None:
    folder = Path(half_built.output)
    unstopped = build_request(inputs, "whole", heldout_fraction=0.1)
    build_corpus(unstopped)
    finished_shards = list(folder.glob("shard-*"))
    times_before = modification_times(finished_shards)
    assert len(finished_shards) == 2

    result = build_corpus(half_built)

    assert result.resumed_shards == 2
    assert modification_times(finished_shards) == times_before
    assert file_contents(folder) == file_contents(Path(unstopped.output))


def test_a_finished_shard_that_was_deleted_is_built_again(
    half_built: BuildRequest, build_request: RequestFactory, inputs: list[Path]
) -> None:
    folder = Path(half_built.output)
    unstopped = build_request(inputs, "whole", heldout_fraction=0.1)
    build_corpus(unstopped)
    (folder / "shard-000001.tar").unlink()

    result = build_corpus(half_built)

    assert result.resumed_shards == 1  # of two finished shards
    assert file_contents(folder) == file_contents(Path(unstopped.output))


@pytest.mark.parametrize(
    "name", ["build.json", "order.json", "groups/000000.json", "buckets/000000.json", "buckets/000000.heldout.npy"]
)
def test_a_changed_number_in_the_records_of_a_build_is_refused(half_built: BuildRequest, name: str) -> None:
    """The last digit of a record, or a token of a held-out row, becomes another one, and the file stays valid."""
    folder = Path(half_built.output)
    path = folder / "progress" / name
    before = path.read_bytes()
    line, newline, rest = before.partition(b"\n")
    if name.endswith("npy"):
        changed = before[:-2] + bytes([before[-2] ^ 1]) + before[-1:]
    else:
        last = re.findall(rb"[0-9]", line)[-1]
        place = line.rindex(last)
        changed = line[:place] + (b"1" if last != b"1" else b"2") + line[place + 1 :] + newline + rest
    path.write_bytes(changed)
    with pytest.raises(UserError, match=rf"progress/{name}: ") as error:
        build_corpus(half_built)
    assert "\n" not in str(error.value)
    assert not (folder / "corpus.json").exists()
    path.write_bytes(before)
    build_corpus(half_built)
    assert (folder / "corpus.json").exists()


CHANGED_SETTINGS = [  # settings of a second build, and the key that its error must name
    ({"seq_len": 32}, "seq_len"),
    ({"seq_len": 32, "shard_size_mb": 4.0}, "seq_len"),  # not the bytes of a chunk, which follow from those of a shard
    ({"seed": 4}, "seed"),
    ({"packing": "none"}, "packing"),
    ({"lowercase": False}, "lowercase"),
    ({"text_field": "body"}, "text_field"),
    ({"heldout_fraction": 0.2}, "heldout_fraction"),
]


@pytest.mark.parametrize(("change", "key"), CHANGED_SETTINGS)
@pytest.mark.parametrize("finished", [False, True])
def test_a_build_with_other_settings_in_the_same_folder_is_refused(
    half_built: BuildRequest, build_request: RequestFactory, inputs: list[Path], change: dict, key: str, finished: bool
) -> None:
    """The folder holds a half-built or a finished corpus, which the refused build must leave as it is."""
    folder = Path(half_built.output)
    if finished:
        build_corpus(half_built)
    contents_before = file_contents(folder)
    settings = {"heldout_fraction": 0.1, **change}

    with pytest.raises(ManifestMismatch, match=f"with {key} = ") as error:
        build_corpus(build_request(inputs, **settings))

    assert "\n" not in str(error.value)
    assert file_contents(folder) == contents_before


def test_a_build_with_another_vocabulary_in_the_same_folder_is_refused(
    half_built: BuildRequest, vocabulary: Vocabulary
) -> None:
    other_vocabulary = Vocabulary(vocabulary.text + "more\n", "other")
    request = dataclasses.replace(half_built, vocabulary=other_vocabulary)

    with pytest.raises(ManifestMismatch, match="with tokenizer = "):
        build_corpus(request)


@pytest.mark.parametrize("change", ["one_character", "fewer_documents"])
def test_a_build_is_not_resumed_if_the_text_of_its_inputs_changed(
    half_built: BuildRequest, build_request: RequestFactory, inputs: list[Path], change: str
) -> None:
    first_input, second_input = inputs
    data = first_input.read_bytes()
    if change == "one_character":
        first_input.write_bytes(data.replace(b"document 3", b"document 4"))
    else:
        first_input.write_bytes(data[:1000])
        second_input.write_bytes(b"")

    with pytest.raises(ManifestMismatch, match="half built from inputs that have changed since"):
        build_corpus(build_request(inputs, heldout_fraction=0.1))


@pytest.mark.parametrize("stage", ["reading", "rows"])
def test_a_build_goes_on_where_its_inputs_were_moved_with_the_bytes_of_one_that_was_not_stopped(
    build_request: RequestFactory,
    prose: Prose,
    jsonl_file: JsonlFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stage: str,
) -> None:
    """The sources keep the names that they had when the build began, in every record."""
    texts = tmp_path / "texts"
    for name in ("books", "wiki"):
        (texts / name).mkdir(parents=True)
        jsonl_file(prose(400, 6), f"texts/{name}/a.jsonl")
    build_corpus(build_request(texts, "whole", heldout_fraction=0.1))
    stage_class = worker_stages.InputReader if stage == "reading" else worker_stages.RowMaker
    work = stage_class.__call__
    num_calls = itertools.count()

    def stop_at_second_call(self, task):  # type: ignore[no-untyped-def]
        if next(num_calls) == 1:
            raise BuildStopped
        return work(self, task)

    with monkeypatch.context() as patch:
        patch.setattr(stage_class, "__call__", stop_at_second_call)
        with pytest.raises(BuildStopped):
            build_corpus(build_request(texts, heldout_fraction=0.1))
    texts.rename(tmp_path / "moved")

    build_corpus(build_request(tmp_path / "moved", heldout_fraction=0.1))

    assert file_contents(tmp_path / "corpus") == file_contents(tmp_path / "whole")
    assert f"it goes on to name their sources: {texts}/books, {texts}/wiki" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_half_built_corpus_of_inputs_that_are_divided_into_other_sources_is_refused(
    half_built: BuildRequest, build_request: RequestFactory, tmp_path: Path, inputs: list[Path]
) -> None:
    """The same two files are one source if their folder is given, and two if they are given by name."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for path in inputs:
        path.rename(folder / path.name)

    with pytest.raises(ManifestMismatch, match="other names, sizes or sources of files"):
        build_corpus(build_request(folder, heldout_fraction=0.1))


def test_a_build_that_met_a_truncated_input_goes_on_once_the_file_is_whole(
    build_request: RequestFactory,
    inputs: list[Path],
    prose: Prose,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Files that were read before the error are not read again; the corpus is that of a build without an error."""
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in prose(50, 8)]
    whole_data = gzip.compress(b"".join(lines))
    path = tmp_path / "z.jsonl.gz"
    path.write_bytes(whole_data[:-2000])
    with pytest.raises(UserError, match=r"z\.jsonl\.gz: cannot be read to its end"):
        build_corpus(build_request([*inputs, path]))
    path.write_bytes(whole_data)

    resumed = build_corpus(build_request([*inputs, path]))

    unstopped = build_corpus(build_request([*inputs, path], "at_once"))
    assert "groups of inputs are read" in capsys.readouterr().out
    assert resumed.manifest == unstopped.manifest


def test_an_input_that_is_deleted_after_the_inputs_were_listed_is_named(
    build_request: RequestFactory, inputs: list[Path]
) -> None:
    """Between the two, a build may have trained a vocabulary for hours."""
    request = build_request(inputs)
    inputs[1].unlink()

    with pytest.raises(UserError, match=r"b\.jsonl: is gone since the inputs were listed"):
        build_corpus(request)


def test_a_build_from_other_inputs_into_a_finished_corpus_is_refused(
    build_request: RequestFactory, inputs: list[Path]
) -> None:
    build_corpus(build_request(inputs))

    with pytest.raises(ManifestMismatch, match="finished corpus that was built from other inputs"):
        build_corpus(build_request(inputs[:1]))


@pytest.fixture
def tables(prose: Prose, tmp_path: Path) -> Path:
    """A folder with a parquet file, whose text is in the column `body`; other files are beside the folder."""
    folder = tmp_path / "tables"
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"body": prose(60, 5)}), folder / "a.parquet")
    (tmp_path / "damaged.parquet").write_bytes((folder / "a.parquet").read_bytes()[:500])
    (tmp_path / "lines.jsonl").write_text('{"text": "one"}\n')
    return folder


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"text_field": "text"}, r"no column `text` of text; set --text-field"),
        ({"inputs": "damaged.parquet"}, r"damaged\.parquet: cannot be read to its end"),
        ({"source_epochs": {"wiki": 2}}, r"corpus\.source_epochs: wiki is not a source of these inputs"),
        ({"source_shares": {"wiki": 2}}, r"corpus\.source_shares: wiki is not a source of these inputs"),
        ({"licences": {"wiki": "mit"}}, r"corpus\.licences: wiki is not a source of these inputs"),
        ({"inputs": "lines.jsonl"}, r"no usable document among 1 \(no_text 1\)"),
    ],
)
@pytest.mark.parametrize("has_vocabulary", [False, True])
def test_a_refused_build_that_has_read_nothing_leaves_its_output_to_the_corrected_command(
    build_request: RequestFactory,
    tables: Path,
    tmp_path: Path,
    vocabulary: Vocabulary,
    wrong: dict,
    message: str,
    has_vocabulary: bool,
) -> None:
    """The corrected command also has another seed, and gives the bytes of one in a new folder."""
    folder = tmp_path / "corpus"
    if has_vocabulary:
        folder.mkdir()
        (folder / "vocab.txt").write_text(vocabulary.text)
    settings = {"text_field": "body", **wrong}
    with pytest.raises(UserError, match=message):
        build_corpus(build_request(tmp_path / settings.pop("inputs", "tables"), **settings))
    left = file_contents(folder) if folder.exists() else {}
    assert list(left) == (["vocab.txt"] if has_vocabulary else [])

    build_corpus(build_request(tables, text_field="body", seed=9))

    build_corpus(build_request(tables, "new", text_field="body", seed=9))
    assert file_contents(folder) == file_contents(tmp_path / "new")


def test_an_interrupted_build_that_has_read_nothing_leaves_its_output(
    build_request: RequestFactory, tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(worker_stages, "write_spill", interrupt)
        with pytest.raises(KeyboardInterrupt):
            build_corpus(build_request(tables, text_field="body"))

    assert not build_corpus(build_request(tables, text_field="body", seed=9)).was_finished


def test_a_refused_part_leaves_the_claim_of_the_output_to_the_other_parts(
    build_request: RequestFactory, tables: Path
) -> None:
    request = build_request(tables, text_field="text")
    with pytest.raises(UserError, match="no column `text` of text"):
        build_part(request, Part(1, 2))

    with pytest.raises(ManifestMismatch, match="half-built corpus with seed = "):
        build_part(dataclasses.replace(request, seed=9), Part(2, 2))
