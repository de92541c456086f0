"""`electra-dist corpus`: the commands build, vocab and index."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import webdataset
import yaml
from electra_launcher.cli.main import app as whole_app
from electra_launcher.cli.main import corpus_app as app
from support.hostile_text import HOSTILE, assert_shown
from typer.testing import CliRunner

from electra_dist.errors import UserError


def run(*arguments: object) -> str:
    """Run a command and return its output; raise its error."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config file with a vocabulary of 120 entries and rows of 64 tokens."""
    tower = {"hidden_size": 8, "num_layers": 1, "num_heads": 1, "intermediate_size": 8}
    tree = {
        "run_dir": "unused",
        "model": {"vocab_size": 120, "max_positions": 64, "discriminator": tower, "generator": tower},
        "data": {"corpus": "unused", "seq_len": 64},
        "train": {"num_steps": 1, "global_batch": 1, "micro_batch": 1},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture
def text(prose: Callable[[int, int], list[str]], tmp_path: Path) -> Path:
    """An input file of 60 documents."""
    path = tmp_path / "input.txt"
    path.write_text("\n\n".join(prose(60, 1)))
    return path


def test_build_trains_a_vocabulary_and_a_second_build_does_nothing(config: Path, text: Path, tmp_path: Path) -> None:
    command = ["build", "--input", text, "--output", tmp_path / "corpus", "--config", config, "--workers", 1]
    output = run(*command)
    assert "training a vocabulary of 120 entries" in output
    assert "built; 1 shard\n" in output
    assert "documents in" in output
    assert f"vocabulary {tmp_path / 'corpus/vocab.txt'}\n" in output
    assert output.splitlines()[-1].startswith(f"next: electra-dist train {config} --set data.corpus={tmp_path}/corpus")
    manifest = json.loads((tmp_path / "corpus/corpus.json").read_text())
    assert manifest["tokenizer"]["vocab_size"] == 120
    again = run(*command)
    assert "already built, nothing to do" in again
    assert output.splitlines()[-3:] == again.splitlines()[-3:]
    assert output.splitlines()[-3].startswith("fingerprint ")


def test_build_reports_what_it_reads_and_leaves_out_and_info_shows_it_again(
    config: Path, prose: Callable[[int, int], list[str]], tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    (folder / "wiki").mkdir(parents=True)
    texts = prose(60, 1)
    (folder / "a.md").write_text(texts[0])
    (folder / "wiki/b.txt").write_bytes("\n\n".join(texts[1:]).encode() + b"\n\ncaf\xe9")
    (folder / "page.html").write_text("x")
    (folder / "gone.txt").symlink_to(tmp_path / "missing.txt")

    built = run("build", "--input", folder, "--output", tmp_path / "c", "--config", config, "--workers", 1)
    shown = run("info", tmp_path / "c")

    lines = built.splitlines()
    assert any(line.startswith("input: 2 files, ") and "left out: .html 1 (web pages" in line for line in lines)
    remarks = [
        "left out, a link to nothing: gone.txt",
        "left out 1 document of 4 bytes for 1 byte that are not UTF-8; set corpus.undecodable: replace to keep them; "
        f"in {folder}/wiki/b.txt 1",
    ]
    for output in (built, shown):
        assert [line for line in output.splitlines() if line.startswith("left out")] == remarks
        assert "read: .md" in output
        assert "wiki" in output
        assert lines[-3] in output, "the fingerprint"


def test_a_finished_corpus_that_has_lost_files_says_what_to_do(config: Path, text: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "c"
    command = ["build", "--input", text, "--output", corpus, "--config", config, "--workers", 1]
    command += ["--set", "corpus.heldout_fraction=0.3"]
    run(*command)
    files = {path: path.read_bytes() for path in corpus.rglob("*") if path.is_file()}
    shard, manifest = corpus / "shard-000000.tar", corpus / "heldout" / "corpus.json"
    what_to_do = {
        shard: r"1 of 1 shards are missing .*shard-000000\.tar; restore .*or delete the corpus and build it again",
        manifest: r"no held-out corpus; restore .*, or delete the corpus .*/c and build it again, which makes both",
    }
    for lost, message in what_to_do.items():
        lost.unlink()
        for again in (command, ["info", corpus], ["merge", corpus], [*command, "--part", "1/1"]):
            with pytest.raises(UserError, match=message):
                run(*again)
        checked = CliRunner().invoke(whole_app, ["verify", "--bytes", str(corpus)])
        assert f"BAD: {lost}: " in checked.output
        lost.write_bytes(files[lost])
    assert "already built, nothing to do" in run(*command)
    assert {path: path.read_bytes() for path in corpus.rglob("*") if path.is_file()} == files


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("corpus build --input in --output c --config f --text-field a --text-field=b", "--text-field"),
        ("checkpoint verify run --step 1 --step 2", "--step"),
        ("train run --gpus 1 --ranks 2", "--gpus"),
    ],
)
def test_an_option_of_one_value_that_is_given_twice_is_refused(command: str, option: str) -> None:
    result = CliRunner().invoke(whole_app, command.split())
    assert result.exit_code == 2
    assert option in result.output and "given more than once" in result.output


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (
            "finetune --model m --data d --epochs 2",
            "No such option: --epochs; a setting is given by --set epochs=VALUE",
        ),
        ("finetune --model m --data d --learning-rate=3e-4", "a setting is given by --set lr=VALUE"),
        ("train run --train.num_steps 9", "a setting is given by --set train.num_steps=VALUE"),
        ("corpus build --seq-len 9", "a setting is given by --set data.seq_len=VALUE"),
        ("status run --epochs 2", "No such option: --epochs"),
        ("finetune --model m --dat d", "--data"),
    ],
)
def test_an_unknown_option_with_the_name_of_a_setting_is_answered_with_set(command: str, answer: str) -> None:
    result = CliRunner().invoke(whole_app, command.split(), env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "No such option" in result.output
    assert answer in result.output
    assert ("a setting is given" in result.output) == ("a setting is given" in answer)


def test_records_without_the_texts_field_are_followed_by_what_to_do(config: Path, tmp_path: Path) -> None:
    records = [{"text": "one two three"}] * 30 + [{"body": "four five six"}] * 30
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    command = ["build", "--input", tmp_path / "in.jsonl", "--output", tmp_path / "c", "--config", config]
    output = " ".join(run(*command, "--workers", 1, "--set", "model.vocab_size=60").split())
    assert "records without the text's field: body; all inputs of a build have one --text-field" in output
    assert "corpus prepare" in output


def test_info_of_an_indexed_corpus_has_no_report_and_of_an_unfinished_one_is_an_error(
    config: Path, text: Path, tmp_path: Path
) -> None:
    run("build", "--input", text, "--output", tmp_path / "c", "--config", config, "--workers", 1)
    for name in ("corpus.json", "build.json"):
        (tmp_path / "c" / name).unlink()
    with pytest.raises(UserError, match="no finished corpus"):
        run("info", tmp_path / "c")
    run("index", tmp_path / "c", "--vocab", tmp_path / "c/vocab.txt")

    shown = run("info", tmp_path / "c")

    assert "no report of the inputs" in shown
    assert "1 shard" in shown


def test_build_uses_the_vocabulary_that_vocab_wrote_and_refuses_another_size(
    config: Path, text: Path, tmp_path: Path
) -> None:
    vocab = tmp_path / "v/vocab.txt"
    assert "120 entries" in run("vocab", "--input", text, "--output", vocab, "--size", 120)
    output = run(
        "build", "--input", text, "--output", tmp_path / "c", "--config", config, "--vocab", vocab, "--workers", 1,
        "--set", "corpus.packing=none",
    )  # fmt: skip
    assert "built; 1 shard\n" in output
    assert (tmp_path / "c/vocab.txt").read_bytes() == vocab.read_bytes()
    with pytest.raises(UserError, match=r"120 entries, more than model\.vocab_size \(119\)"):
        run(
            "build",
            "--input",
            text,
            "--output",
            tmp_path / "d",
            "--config",
            config,
            "--vocab",
            vocab,
            "--set",
            "model.vocab_size=119",
        )
    assert not (tmp_path / "d").exists()


WRONG_FIELD = "set --text-field to a field with text (body, meta.title), or "


def test_a_wrong_text_field_names_the_fields_that_are_there(config: Path, text: Path, tmp_path: Path) -> None:
    """Each command that reads texts of inputs says so, before it has a vocabulary and with one."""
    run("vocab", "--input", text, "--output", tmp_path / "vocab.txt", "--size", 120)
    record = {"body": "some words", "meta": {"title": "more words"}, "number": 3}
    lines = tmp_path / "a.jsonl"
    lines.write_text(f"{json.dumps(record)}\n" * 3)
    build = ["build", "--input", lines, "--output", tmp_path / "c", "--config", config, "--workers", 1]
    commands = [
        ["vocab", "--input", lines, "--output", tmp_path / "v.txt"],
        ["vocab", "--input", lines, "--output", tmp_path / "v.json", "--tokenizer", "bpe"],
        build,
        [*build, "--vocab", tmp_path / "vocab.txt"],
        ["plan", config, "--input", lines],
        ["plan", config, "--input", lines, "--vocab", tmp_path / "vocab.txt"],
    ]
    for command in commands:
        with pytest.raises(UserError) as error:
            run(*command)
        assert f"no usable document among 3 (no_text 3); {WRONG_FIELD}" in str(error.value), command
    assert not (tmp_path / "v.txt").exists()


def test_columns_of_tables_without_the_text_field_are_named(config: Path, tmp_path: Path) -> None:
    """A table within a folder is left out, as it may only describe the texts there."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.csv").write_text("body,meta.title\nsome words,more words\n")
    build = ["build", "--output", tmp_path / "c", "--config", config, "--workers", 1]
    for command in (["vocab", "--output", tmp_path / "v.txt"], build):
        with pytest.raises(UserError) as error:
            run(*command, "--input", tmp_path / "in")
        assert WRONG_FIELD in str(error.value)


def test_tables_without_the_text_field_beside_texts_are_named_by_vocab_and_build(config: Path, text: Path) -> None:
    folder = text.parent / "mixed"
    folder.mkdir()
    text.rename(folder / "a.txt")
    (folder / "tickets.csv").write_text("body,number\nsome words,1\n")
    expected = (
        "left out, a table without the column of --text-field: tickets.csv; .txt files need no field: one "
        "--text-field serves both"
    )

    vocab = run("vocab", "--input", folder, "--output", text.parent / "v.txt", "--size", 60)
    build = run("build", "--input", folder, "--output", text.parent / "c", "--config", config, "--workers", 1)

    for output in (vocab, build):
        assert expected in " ".join(output.split())


def test_vocab_says_how_many_documents_gave_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n{"body": "some words"}\n{"body": "more words"}\n')
    (tmp_path / "b.jsonl").write_text('{"other": "words"}\n')

    output = run("vocab", "--input", tmp_path / "a.jsonl", "--input", tmp_path / "b.jsonl", "--output", tmp_path / "v")

    assert "left out 3 of 4 documents: no_text 3\n" in output
    assert "fields with text in records without the text's field: body, other\n" in output
    assert f"{tmp_path}/b.jsonl: no usable document among 1 (no_text 1); set --text-field" in output


@pytest.mark.parametrize("output", ["in/vocab.txt", "in/a.txt"])
def test_a_vocabulary_is_not_written_among_the_texts_nor_over_one(tmp_path: Path, output: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("some words")

    for text in (tmp_path / "in", tmp_path / "in/a.txt", tmp_path / "in/{a,b}.txt")[: 1 if "vocab" in output else 3]:
        with pytest.raises(UserError, match="is inside the input"):
            run("vocab", "--input", text, "--output", tmp_path / output)

    assert [path.read_text() for path in (tmp_path / "in").iterdir()] == ["some words"]


def test_jobs_that_would_write_a_corpus_among_its_inputs_are_not_submitted(config: Path, tmp_path: Path) -> None:
    command = ["submit", "--input", tmp_path, "--output", tmp_path / "corpus", "--config", config, "--parts", 2]
    with pytest.raises(UserError, match="is inside the input"):
        run(*command, "--time", "1:00:00")
    assert not (tmp_path / "corpus").exists()


def test_index_of_shards_of_another_writer_gives_the_totals_and_tokenizer_of_build(
    config: Path, text: Path, tmp_path: Path
) -> None:
    run("build", "--input", text, "--output", tmp_path / "ours", "--config", config, "--workers", 1)
    with webdataset.TarWriter(str(tmp_path / "theirs.tar")) as sink:
        for sample in webdataset.WebDataset(str(tmp_path / "ours/shard-000000.tar"), shardshuffle=False).decode():
            sink.write({"__key__": sample["__key__"], "rows.npy": sample["rows.npy"]})
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs.tar").rename(tmp_path / "theirs/a.tar")
    output = run("index", tmp_path / "theirs", "--vocab", tmp_path / "ours/vocab.txt")
    ours, theirs = (json.loads((tmp_path / name / "corpus.json").read_text()) for name in ("ours", "theirs"))
    assert "1 shard" in output
    assert theirs["totals"]["tokens"] == ours["totals"]["tokens"]
    assert theirs["tokenizer"] == ours["tokenizer"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--input": "missing.txt"}, r"missing\.txt: no such file"),
        ({"--input": "config.yaml"}, "unknown kind of file"),
        ({"--vocab": "none.txt"}, r"none\.txt: no such vocabulary"),
        ({"--vocab": "config.yaml"}, "not a WordPiece vocabulary"),
        ({"--config": "none.yaml"}, "no such config file"),
        ({"--output": "input.txt/corpus"}, "input.txt"),
        ({"--output": "ftp://bucket/x"}, "unknown kind of storage"),
        ({"--input": ".", "--output": "corpus"}, "is inside the input"),
        ({"--input": "s3://bucket/a", "--output": "s3://bucket/a/b"}, "is inside the input"),
        ({"--input": "shard-{000..002}.tar"}, r"shard-000\.tar: no such file or folder \(one of the pattern"),
        ({"--input": "in", "--vocab": "in/vocab.txt"}, r"--vocab in/vocab\.txt is one of the inputs"),
        ({"--set": "corpus.packng=none"}, r"did you mean `corpus\.packing`"),
    ],
)
def test_bad_input_gives_one_line_and_writes_nothing(
    config: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/vocab.txt").write_text("a")
    options = {"--input": "input.txt", "--output": "corpus", "--config": "config.yaml", "--workers": "1", **changes}
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=message) as error:
        run("build", *(part for option in options.items() for part in option))
    assert "\n" not in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before, "something was written"


def test_names_and_licences_of_others_are_shown_escaped_by_build_info_and_find(
    config: Path, prose: Callable[[int, int], list[str]], tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    source = folder / f"{HOSTILE.replace('/', '')}"
    source.mkdir(parents=True)
    (source / "a.txt").write_text("\n\n".join(prose(60, 1)))
    (source / "gone[bold]\x1b[2J.txt").symlink_to(tmp_path / "missing.txt")
    (folder / os.fsdecode(b"b-\xff\x1b[2J.txt")).write_text("more text")
    output = tmp_path / "corpus"

    built = run("build", "--input", folder, "--output", output, "--config", config, "--workers", 1)
    report = json.loads((output / "build.json").read_text())
    report["sources"] = {HOSTILE: {**next(iter(report["sources"].values())), "licence": HOSTILE}}
    report["files_read"][HOSTILE] = {"files": 1, "bytes": 1}
    report["skipped_names"]["broken_link"].append(HOSTILE)
    (output / "build.json").write_text(json.dumps(report))
    shown = run("info", output)
    sources = run("find", output, "--source", HOSTILE)

    for text in (built, shown, sources):
        assert text.replace("\n", "").isprintable(), ascii(text)
    assert "gone[bold]\\x1b[2J.txt" in built
    assert_shown(shown, times=4)
    assert_shown(sources)
