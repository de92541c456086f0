"""Parts of a preparation alone: pages of WARC files, words, counts and samples, lists, documentation."""

from __future__ import annotations

import inspect
import itertools
import random
from pathlib import Path

import pytest
import yaml
from electra_launcher.cli.main import app
from made_sources import english, page, warc, wet
from prepare_processes import REPOSITORY
from typer.testing import CliRunner

from electra_dist.config.keys import section_class
from electra_dist.config.load import load_section
from electra_dist.corpus.inputs.find_inputs import InputFile, search_inputs
from electra_dist.corpus.inputs.text_decoding import decode
from electra_dist.corpus.inputs.text_readers import DocumentStream
from electra_dist.corpus.prepare.prepare_config import PrepareConfig
from electra_dist.errors import UserError


def test_the_command_prints_every_key_of_the_file_with_its_default():
    run = CliRunner().invoke(app, ["corpus", "prepare", "--describe"])
    assert run.exit_code == 0
    keys = yaml.safe_load(run.output)
    assert list(keys) == list(PrepareConfig.model_fields)
    for name, section in keys["filters"].items():
        inner = section_class(PrepareConfig.model_fields["filters"].annotation.model_fields[name].annotation)
        assert inner is None or list(section) == list(inner.model_fields)
    assert keys["filters"]["gopher_quality"]["min_doc_words"] == 50
    assert keys["executor"]["slurm"]["time"] == "24:00:00"


def test_the_example_is_a_valid_file():
    config = load_section(REPOSITORY / "configs" / "corpus_prepare.yaml", PrepareConfig)
    assert config.deduplication.minhash is not None


def test_thresholds_that_a_file_leaves_out_are_those_of_datatrove():
    from datatrove.pipeline import filters

    from electra_dist.corpus.prepare import prepare_config as sections

    pairs = (
        (sections.GopherQualitySection, filters.GopherQualityFilter),
        (sections.C4QualitySection, filters.C4QualityFilter),
        (sections.FineWebQualitySection, filters.FineWebQualityFilter),
        (sections.GopherRepetitionSection, filters.GopherRepetitionFilter),
    )
    differing = {}
    for section, step in pairs:
        theirs = inspect.signature(step.__init__).parameters
        for name, field in section.model_fields.items():
            default = theirs[name].default
            if default is None:
                continue  # datatrove's own list of stop words is inside the step
            ours = field.get_default(call_default_factory=True)
            if isinstance(ours, dict):
                default = dict(default)
            if ours != default:
                differing[f"{section.__name__}.{name}"] = (ours, default)
    # FineWeb's script sets this one.
    assert differing == {"C4QualitySection.filter_no_terminal_punct": (False, True)}


def read_until_error(file: InputFile) -> tuple[list[str], str | None]:
    """Return the texts of the pages of a file, and the message of the error that ended the reading."""
    from electra_dist.corpus.prepare.read_sources import read_pages

    texts = []
    try:
        if file.format == "wet":
            pages = map(decode, DocumentStream([file]))
        else:
            pages = (each.text for each in read_pages(file))
        for text in pages:
            texts.append(text)
    except UserError as error:
        return texts, str(error)
    return texts, None


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz", "a.wet", "a.wet.gz"])
def test_a_crawl_file_that_is_cut_off_anywhere_gives_an_error_or_all_whole_records(tmp_path: Path, name: str):
    path = tmp_path / name
    if ".warc" in name:
        warc(path, [(f"http://x/{seed}", page(english(seed)), "text/html", "200 OK") for seed in range(3)])
    else:
        wet(path, [(f"http://x/{seed}", english(seed)) for seed in range(3)])
    whole = path.read_bytes()
    (file,) = search_inputs([path], with_pages=True).files
    texts, message = read_until_error(file)
    assert len(texts) == 3 and message is None
    draw = random.Random(1)
    for cut in [len(whole) - 1, *(draw.randrange(1, len(whole)) for _ in range(60))]:
        path.write_bytes(whole[:cut])
        (file,) = search_inputs([path], with_pages=True).files
        read, message = read_until_error(file)
        assert read == texts[: len(read)], cut
        assert message is None or message.startswith(f"{path}: cannot be read to its end")


def test_pages_in_other_encodings_are_decoded(tmp_path: Path):
    from electra_dist.corpus.prepare.read_sources import read_pages

    html = "<html><head><meta charset='iso-8859-1'></head><p>Gr\u00f6\u00dfe</p></html>"
    (tmp_path / "a.html").write_bytes(html.encode("latin1"))
    (file,) = search_inputs([tmp_path], with_pages=True).files
    assert "Gr\u00f6\u00dfe" in next(iter(read_pages(file))).text


def test_a_corpus_build_does_not_read_pages(tmp_path: Path):
    (tmp_path / "a.html").write_bytes(page("text"))
    (tmp_path / "b.txt").write_text("text")
    found = search_inputs([tmp_path])
    assert [file.name for file in found.files] == ["b.txt"]
    assert found.skipped.skipped["page"][".html"] == 1


def test_words_and_sentences():
    from electra_dist.corpus.prepare.filter_steps import PlainWords

    text = 'It\'s a well-known case. "Is it?" he asked\nA line without an end\n\nThe end...'
    words = PlainWords()
    assert words.word_tokenize("It's a well-known case.") == ["It's", "a", "well-known", "case", "."]
    assert words.sent_tokenize(text) == [
        "It's a well-known case.",
        '"Is it?"',
        "he asked",
        "A line without an end",
        "The end...",
    ]
    spans = words.span_tokenize(text)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    assert "".join(text.split()) == "".join("".join(text[start:end].split()) for start, end in spans)
    assert words == PlainWords() and hash(words) == hash(PlainWords())


def test_sentences_end_with_the_marks_of_other_scripts():
    from electra_dist.corpus.prepare.filter_steps import PlainWords

    sentences = {
        "\u092f\u0939 \u0918\u0930 \u0939\u0948\u0964 \u0935\u0939 \u0928\u0926\u0940 \u0939\u0948\u0964": 2,  # Hindi
        "\u4eca\u5929\u4e0b\u96e8\u3002\u300c\u56de\u5bb6\uff01\uff01\u300d\u597d\u5417\uff1f\u662f": 4,  # Chinese
        "\u0647\u0644 \u0647\u0630\u0627 \u0628\u064a\u062a\u061f \u0646\u0639\u0645.": 2,  # Arabic
        "1.5 or 2.5?!": 1,
    }
    assert [len(PlainWords().sent_tokenize(text)) for text in sentences] == list(sentences.values())
    assert "".join(PlainWords().sent_tokenize("\uff01" * 50000)) == "\uff01" * 50000


def test_samples_depend_on_the_documents_and_not_on_their_order():
    from datatrove.data import Document

    from electra_dist.corpus.prepare.document_files import DropRecorder

    documents = [Document(f"text {number}", f"id{number}", metadata={"source": "a"}) for number in range(50)]
    samples = []
    for seed in range(3):
        random.Random(seed).shuffle(documents)
        recorder = DropRecorder(4)
        for document in documents:
            recorder.add_read(document)
            recorder.drop("step", "reason", document)
        samples.append(recorder.as_json()["samples"])
    assert samples[0] == samples[1] == samples[2]
    chosen = [sample["id"] for sample in samples[0]["step"]]
    assert len(set(chosen)) == 4


def test_counts_that_do_not_add_up_are_an_error():
    from datatrove.data import Document

    from electra_dist.corpus.prepare.document_files import DropRecorder

    recorder = DropRecorder(4)
    recorder.add_read(Document("text", "id", metadata={"source": "a"}))
    with pytest.raises(AssertionError):
        recorder.as_json()


def test_lists_of_addresses(tmp_path: Path):
    from datatrove.data import Document

    from electra_dist.corpus.prepare.filter_steps import OfflineUrlFilter
    from electra_dist.corpus.prepare.prepare_config import UrlFilterSection

    (tmp_path / "domains").write_text("# comment\n\nbad.co.uk\nsub.half.org\n")
    (tmp_path / "words").write_text("casino\n")
    step = OfflineUrlFilter(UrlFilterSection(domains=tmp_path / "domains", words=tmp_path / "words"), None)

    def reason(url: str | None) -> object:
        return step.filter(Document("text", "id", metadata={"url": url} if url else {}))

    assert reason("http://www.bad.co.uk/x") == (False, "domain")
    assert reason("http://sub.half.org/x") == (False, "subdomain")
    assert reason("http://good.org/a-casino-b") == (False, "hard_blacklisted")
    assert reason("http://half.org/x") is True
    assert reason(None) is True
