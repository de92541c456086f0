"""What a preparation refuses before it begins, each with one line that names the key or the file and the next step."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from electra_launcher.cli.main import app
from made_sources import lines
from typer.testing import CliRunner

from electra_dist.config.load import load_section
from electra_dist.corpus.prepare.prepare_config import PrepareConfig
from electra_dist.errors import StoreAway, UserError

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write(filters={...})`: the path of a config with one good source and these keys."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(lines(["one text"]))

    def write_config(**keys: Any) -> Path:
        tree = {
            "output": str(tmp_path / "out"),
            "work": str(tmp_path / "work"),
            "sources": [{"name": "web", "path": str(tmp_path / "in")}],
            **keys,
        }
        path = tmp_path / "pipeline.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    return write_config


def refusal(path: Path) -> str:
    """Return the one line with which a preparation is refused; nothing is written."""
    from electra_dist.corpus.prepare.preparation import check, finished_report

    with pytest.raises(UserError) as error:
        finished_report(check(load_section(path, PrepareConfig)))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("keys", "nearest"),
    [
        ({"filter": {}}, "did you mean `filters`"),
        ({"filters": {"gopher_qualiti": {}}}, "did you mean `filters.gopher_quality`"),
        ({"filters": {"gopher_quality": {"min_doc_word": 3}}}, "did you mean `filters.gopher_quality.min_doc_words`"),
        ({"deduplication": {"minhash": {"bucket": 3}}}, "did you mean `deduplication.minhash.num_buckets`"),
        ({"executor": {"task": 3}}, "did you mean `executor.tasks`"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(write: Write, keys: dict[str, Any], nearest: str):
    assert nearest in refusal(write(**keys))


@pytest.mark.parametrize(
    ("filters", "key"),
    [
        ({"language": {"model": "/no/lid.bin", "languages": ["en"]}}, "filters.language.model"),
        ({"c4_bad_words": {"list": "/no/words"}}, "filters.c4_bad_words.list"),
        ({"classifier": {"model": "/no/model.bin", "keep": {"good": 0.5}}}, "filters.classifier.model"),
        ({"url": {"domains": "/no/domains"}}, "filters.url.domains"),
    ],
)
def test_a_missing_model_or_list_is_refused_with_what_to_fetch(write: Write, filters: dict[str, Any], key: str):
    message = refusal(write(filters=filters))
    assert message.startswith(f"{key}: there is no file /no/")
    assert f"set {key} to its path" in message


@pytest.mark.parametrize("filters", [{"language": {"languages": ["en"]}}, {"c4_bad_words": {}}])
def test_a_filter_with_a_model_or_list_needs_its_path(write: Write, filters: dict[str, Any]):
    assert "missing key `filters." in refusal(write(filters=filters))


def test_a_model_that_is_none_is_refused(tmp_path: Path):
    from electra_dist.corpus.prepare.filter_steps import load_model

    (tmp_path / "lid.bin").write_bytes(b"<html>404</html>")
    with pytest.raises(UserError, match=r"lid\.bin: no fastText model .*download the model again"):
        load_model(tmp_path / "lid.bin")


@pytest.mark.parametrize(
    ("given", "nearest"), [("eng", "en"), ("English", "en"), ("__label__de", "de"), ("deu_Latn", "de")]
)
def test_a_label_that_the_model_lacks_is_refused_before_any_work(
    write: Write, tmp_path: Path, language_model: Path, given: str, nearest: str
):
    unknown = f"{language_model} has no label `{given}`; did you mean `{nearest}`? It has 2: de, en"
    language = {"model": str(language_model), "languages": ["en", given]}
    message = refusal(write(filters={"language": language}))
    assert message == f"filters.language.languages: {unknown}"
    run = CliRunner().invoke(app, ["corpus", "prepare", str(tmp_path / "pipeline.yaml"), "--dry-run"])
    assert isinstance(run.exception, UserError) and str(run.exception) == message
    assert {path.name for path in tmp_path.iterdir()} == {"in", "pipeline.yaml"}
    classifier = {"model": str(language_model), "keep": {"de": 0.5, given: 0.5}}
    assert refusal(write(filters={"classifier": classifier})) == f"filters.classifier.keep: {unknown}"


def test_an_output_inside_a_source_is_refused(write: Write, tmp_path: Path):
    assert "is inside the source web" in refusal(write(output=str(tmp_path / "in" / "out")))
    pattern = [{"name": "web", "path": str(tmp_path / "i*")}]
    assert "is inside the source web" in refusal(write(output=str(tmp_path / "in" / "out"), sources=pattern))
    assert "is inside the source web" in refusal(write(work=str(tmp_path / "its"), sources=pattern))
    braces = [{"name": "web", "path": str(tmp_path / "{in,other}")}]
    assert "is inside the source web" in refusal(write(output=str(tmp_path / "other" / "out"), sources=braces))


def test_sources_without_files_are_refused(write: Write, tmp_path: Path):
    sources = [{"name": "web", "path": f"{tmp_path}/in/*.parquet"}]
    assert refusal(write(sources=sources)).startswith("sources: web: no file matches ")
    sources = [{"name": "web", "path": f"{tmp_path}/nothing"}]
    assert refusal(write(sources=sources)).startswith(f"sources: web: {tmp_path}/nothing: no such file or folder")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"filters": {"drop_pattern": "("}},
            r"`filters\.drop_pattern`: no regular expression of Python's \(missing \)",
        ),
        ({"filters": {"drop_pattern": r"\p{L}"}}, r"bad escape"),
        ({"filters": {"drop_pattern": "a{99999999999}"}}, r"the repetition number is too large"),
        ({"filters": {"drop_pattern": "(" * 5000 + ")" * 5000}}, r"`filters\.drop_pattern`: no regular expression"),
        ({"filters": {"gopher_repetition": {"dup_n_grams": {0: 0.1}}}}, r"dup_n_grams\.0.*greater than 0"),
        ({"filters": {"gopher_repetition": {"top_n_grams": {-1: 0.1}}}}, r"top_n_grams\.-1.*greater than 0"),
        (
            {"formatting": {"pii": {"email_replacement": []}}},
            r"`formatting\.pii\.email_replacement`: .*at least 1 item",
        ),
        ({"formatting": {"pii": {"ip_replacement": []}}}, r"`formatting\.pii\.ip_replacement`: .*at least 1 item"),
        ({"deduplication": {"minhash": {"seed": 2**32}}}, r"`deduplication\.minhash\.seed`: .*less than 4294967296"),
        ({"samples_per_filter": 10**30}, r"`samples_per_filter`: .*less than or equal to"),
    ],
)
def test_a_value_with_which_a_step_would_fail_is_refused(write: Write, keys: dict[str, Any], message: str):
    assert re.search(message, refusal(write(**keys)))


def test_two_sources_of_one_name_are_refused(write: Write, tmp_path: Path):
    sources = [{"name": "web", "path": f"{tmp_path}/in"}] * 2
    assert "two sources have the name web" in refusal(write(sources=sources))


def test_slurm_needs_its_section_and_lines_that_slurm_can_hold(write: Write):
    assert "kind slurm needs the section slurm" in refusal(write(executor={"kind": "slurm"}))
    executor = {"kind": "slurm", "slurm": {"partition": "a\nrm -r x"}}
    assert "line break" in refusal(write(executor=executor))


def test_a_work_folder_of_another_preparation_is_refused_with_the_difference(write: Write, tmp_path: Path):
    from electra_dist.corpus.prepare.preparation import check
    from electra_dist.corpus.prepare.source_plan import write_plan

    (tmp_path / "work").mkdir()
    write_plan(check(load_section(write(), PrepareConfig)).plan, tmp_path / "work")
    other = check(load_section(write(filters={"gopher_quality": {"min_doc_words": 3}}), PrepareConfig)).plan
    with pytest.raises(UserError, match=r"filters\.gopher_quality.* set another `work`, or delete"):
        write_plan(other, tmp_path / "work")
    other = check(load_section(write(executor={"tasks": 2}), PrepareConfig)).plan
    with pytest.raises(UserError, match=r"executor\.tasks 1, not 2"):
        write_plan(other, tmp_path / "work")
    (tmp_path / "in" / "b.jsonl").write_bytes(lines(["another text"]))
    other = check(load_section(write(), PrepareConfig)).plan
    with pytest.raises(UserError, match="1 files, and the sources have 2 now"):
        write_plan(other, tmp_path / "work")


@pytest.mark.parametrize("damage", [b"{}", b"[1]", b"\xff", b'{"files": [[1]]}', b"[" * 5000])
def test_a_damaged_plan_is_refused(tmp_path: Path, damage: bytes):
    from electra_dist.corpus.prepare.source_plan import read_plan

    (tmp_path / "plan.json").write_bytes(damage)
    with pytest.raises(UserError, match=r"plan\.json: damaged, .* prepare again"):
        read_plan(tmp_path)


def test_another_result_in_the_output_is_refused(write: Write, tmp_path: Path):
    (tmp_path / "out").mkdir()
    for content in ("{}", "[]", "{", '{"config": {}}'):
        (tmp_path / "out" / "prepare.json").write_text(content)
        message = refusal(write())
        assert "damaged, because " in message and "or set another `output`" in message
    counts = dict.fromkeys(("format", "documents_in", "documents_dropped", "documents_out"), 1)
    other = {**counts, "sources": {}, "dropped": {}, "inputs_skipped": {}, "outputs": [], "config": {}}
    (tmp_path / "out" / "prepare.json").write_text(json.dumps(other))
    assert "is the result of another preparation (" in refusal(write())


def test_a_result_of_a_release_without_a_key_that_is_not_set_is_complete(write: Write, tmp_path: Path):
    from electra_dist.corpus.prepare.preparation import check, finished_report

    preparation = check(load_section(write(), PrepareConfig))
    config = json.loads(json.dumps(preparation.plan.identity))
    assert config["filters"].pop("drop_pattern") is None
    counts = dict.fromkeys(("format", "documents_in", "documents_dropped", "documents_out"), 1)
    report = {**counts, "sources": {}, "dropped": {}, "inputs_skipped": {}, "outputs": [], "config": config}
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "prepare.json").write_text(json.dumps(report))
    assert finished_report(preparation) == report
    config["filters"]["drop_pattern"] = "x"
    (tmp_path / "out" / "prepare.json").write_text(json.dumps(report))
    with pytest.raises(UserError, match=r"another preparation \(filters.drop_pattern was \"x\", is null\)"):
        finished_report(preparation)


def test_a_complete_result_of_other_files_is_refused(write: Write, tmp_path: Path) -> None:
    path = write()
    assert CliRunner().invoke(app, ["corpus", "prepare", str(path)]).exit_code == 0

    (tmp_path / "in" / "b.jsonl").write_bytes(lines(["a text that was added"]))

    message = refusal(path)
    assert "is the result of other files of the source web (21 bytes in 1, now 55 in 2)" in message
    assert "set another `output` and `work`" in message


def test_a_damaged_input_ends_the_preparation_with_one_line(write: Write, tmp_path: Path):
    from electra_dist.corpus.prepare.preparation import check, run

    whole = gzip.compress(lines(["a text"] * 1000))
    (tmp_path / "in" / "b.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    preparation = check(load_section(write(), PrepareConfig))
    with pytest.raises(UserError, match=r"b\.jsonl\.gz: cannot be read to its end .*replace the file or leave it out"):
        run(preparation, lambda *progress: None)
    assert not (tmp_path / "out" / "prepare.json").exists()


def test_documents_of_others_in_the_output_are_not_replaced(write: Write, tmp_path: Path):
    from electra_dist.corpus.prepare.preparation import check, run

    mine = tmp_path / "out" / "documents" / "00000.jsonl.gz"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    with pytest.raises(UserError, match=r"documents/00000\.jsonl\.gz: .*set another `output`") as error:
        run(check(load_section(write(), PrepareConfig)), lambda *_: None)
    assert "\n" not in str(error.value)
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == [mine]
    assert mine.read_bytes() == b"mine"
    assert not (tmp_path / "work" / "plan.json").exists()


def test_a_repeated_stage_deletes_the_marks_of_its_tasks_only(write: Write, tmp_path: Path):
    from electra_dist.corpus.prepare.preparation import check, completed_tasks, forget_completed, run_folder

    config = load_section(write(), PrepareConfig)
    stage = check(config).stages[-1]
    folder = run_folder(config, stage) / "completions"
    folder.mkdir(parents=True)
    for name in ("00000", "00001", "notes.txt"):
        (folder / name).touch()
    assert completed_tasks(config, stage) == 2
    forget_completed(config, stage)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_a_preparation_that_ends_before_it_has_a_result_leaves_its_work_folder_to_the_corrected_file(
    write: Write, tmp_path: Path
):
    from electra_dist.corpus.prepare.preparation import check, finished_report, run, submit_to_slurm

    def prepare(start: Callable[..., object], *arguments: object, **keys: Any) -> Any:
        preparation = check(load_section(write(**keys), PrepareConfig))
        start(preparation, *arguments)
        return finished_report(preparation)

    (tmp_path / "tables").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"body": ["one text"]}), tmp_path / "tables" / "a.parquet")
    source = {"name": "web", "path": str(tmp_path / "tables")}
    with pytest.raises(UserError, match="sbatch"):
        prepare(submit_to_slurm, executor={"kind": "slurm", "slurm": {"partition": "p"}}, samples_per_filter=1)
    with pytest.raises(UserError, match=r"no column `text` of text; set the source's text_field to .*: body"):
        prepare(run, lambda *progress: None, sources=[source])

    report = prepare(run, lambda *progress: None, sources=[{**source, "text_field": "body"}])

    assert report["documents_out"] == 1
    with pytest.raises(UserError, match=r"holds a preparation with samples_per_filter 5, not 4"):
        prepare(run, lambda *progress: None, sources=[{**source, "text_field": "body"}], samples_per_filter=4)


def test_a_source_whose_kept_documents_are_no_text_is_named(write: Write, tmp_path: Path) -> None:
    codes = [hashlib.sha256(bytes([number])).hexdigest() * 4 for number in range(20)]
    (tmp_path / "in" / "a.jsonl").write_bytes(lines(codes))
    path = write(samples_per_filter=1)
    for _ in ("prepares", "finds it complete"):
        done = CliRunner().invoke(app, ["corpus", "prepare", str(path)], catch_exceptions=False)
        assert "source web looks like no text: its words have 256 characters on average" in " ".join(
            done.output.split()
        )
    report = json.loads((tmp_path / "out" / "prepare.json").read_text())
    assert report["sources"]["web"]["shape"]["plain_characters"] == 20 * 256


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.jsonl", b'{"body": "one", "about": {"title": "two"}, "n": 3}\n'), ("a.csv", b"body,about.title\none,two\n")],
)
def test_a_wrong_text_field_of_a_source_names_the_fields_that_are_there(
    write: Write, tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / "in" / "a.jsonl").unlink(missing_ok=True)
    (tmp_path / "in" / name).write_bytes(content)
    done = CliRunner().invoke(app, ["corpus", "prepare", str(write())])
    message = " ".join(str(done.exception or done.output).split())
    assert "the preparation keeps no document" in message
    assert "fields with text in records without the text's field (text_field): about.title, body" in message


def test_storage_that_stays_away_is_told_from_a_wrong_file() -> None:
    """The first one ends with 75, and the second one with 78."""
    from electra_dist.corpus.prepare.read_sources import _naming_key

    def pages() -> Iterator[Any]:
        raise StoreAway("s3://texts: no answer")
        yield

    with pytest.raises(StoreAway):
        list(_naming_key(pages()))


def test_a_preparation_that_keeps_nothing_ends_with_78_and_names_the_steps(write: Write, tmp_path: Path) -> None:
    (tmp_path / "in" / "a.jsonl").write_bytes(lines(["one text"]) + b"{broken\n")
    path = write(filters={"gopher_quality": {}})
    for _ in ("prepares", "finds it complete"):
        done = CliRunner().invoke(app, ["corpus", "prepare", str(path)])
        assert done.exit_code == 78 or isinstance(done.exception, UserError), done.output
        message = " ".join(str(done.exception or done.output).split())
        assert f"{tmp_path}/out: the preparation keeps no document: source web: none of 2 documents is kept" in message
        assert "dropped by " in message
        assert "read (broken_json) 1" in message
        assert "gopher_quality (" in message
