"""Many [UNK] in a source are named; more than the config allows are refused, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from electra_launcher.cli.main import app
from support.real_runs import write_tiny_config
from typer.testing import CliRunner

from electra_dist.config.load import load_config
from electra_dist.corpus.builder.build_corpus import WHOLE, build_corpus, build_part
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.builder.join_parts import join_parts
from electra_dist.data.corpora import open_corpora
from electra_dist.errors import UserError
from electra_dist.store.open_store import open_store
from electra_dist.tokenizer import Vocabulary
from electra_dist.train.check_inputs import remarks_on_corpora

Request = Callable[..., BuildRequest]
KNOWN = "to in he was that it his her as had " * 3
UNKNOWN = "\u4e2d " * 10


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder with three sources, of which [UNK] are 0 %, 10 % and 83 % of the tokens."""
    texts = {"good": KNOWN * 20, "mixed": KNOWN * 3 + UNKNOWN, "bad": "to in " + UNKNOWN}
    for source, text in texts.items():
        (tmp_path / "in" / source).mkdir(parents=True)
        (tmp_path / "in" / source / "a.txt").write_text(text, "utf-8")
    return tmp_path / "in"


def test_a_build_with_a_source_of_unknown_tokens_is_refused_and_goes_on_when_the_key_allows_it(
    sources: Path, build_request: Request, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"corpus: 83\.3 % of the tokens of \S*in/bad are \[UNK\], .*=1 to") as info:
        build_corpus(build_request(sources))
    assert "\n" not in str(info.value)
    assert not (tmp_path / "corpus" / "corpus.json").exists()

    joined = build_corpus(build_request(sources, max_unk_rate=1.0))
    expected = build_corpus(build_request(sources, output="other", max_unk_rate=0.9))
    assert joined.manifest.fingerprint == expected.manifest.fingerprint
    assert joined.resumed_shards == len(joined.manifest.shards)  # what the refused call has built is used


def test_a_build_of_unknown_tokens_alone_is_refused_before_its_shards_are_written(
    tmp_path: Path, build_request: Request, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("the dog", "utf-8")
    only_special = Vocabulary("\n".join([*vocabulary.special, "zebra"]), "vocab.txt")
    with pytest.raises(UserError, match=r"100\.0 % of the tokens of a sample of the text are \[UNK\]"):
        build_corpus(build_request(tmp_path / "a.txt", vocabulary=only_special))
    assert not list((tmp_path / "corpus").glob("*.tar"))


def test_parts_are_joined_with_the_key_of_the_newest_call(sources: Path, build_request: Request) -> None:
    request = build_request(sources)
    build_part(request, WHOLE)
    with pytest.raises(UserError, match="in/bad are"):
        join_parts(request.output, None)
    build_part(build_request(sources, max_unk_rate=0.9), WHOLE)
    assert join_parts(request.output, None).report is not None


def test_the_commands_name_the_sources_with_many_unknown_tokens(sources: Path, build_request: Request) -> None:
    request = build_request(sources, max_unk_rate=1.0)
    build_corpus(request)
    shown = CliRunner().invoke(app, ["corpus", "info", request.output])
    assert shown.exit_code == 0, shown.output
    lines = [line for line in shown.stdout.splitlines() if "[UNK], because" in line]
    assert ["in/bad are" in line for line in lines] == [True, False]
    assert "10.0 % of the tokens of" in lines[1]


def test_a_run_names_such_sources_and_is_refused_when_it_begins(
    sources: Path, build_request: Request, tmp_path: Path
) -> None:
    request = build_request(sources, max_unk_rate=1.0)
    build_corpus(request)

    def remarks(begins: bool, **keys: Any) -> list[str]:
        """Return what the start of a run on the corpus says."""
        settings = {"data.seq_len": 64, "model.max_positions": 64, "data.heldout": None, **keys}
        file = write_tiny_config(tmp_path / "run.yaml", tmp_path / "run", request.output, **settings)
        config = load_config(file)
        return remarks_on_corpora(config, open_corpora(config.data), begins)

    with pytest.raises(UserError, match=r"corpus: 83\.3 % of the tokens of \S*in/bad .* set corpus\.max_unk_rate=1"):
        remarks(True)
    assert len(remarks(True, **{"corpus.max_unk_rate": 0.9})) == 2
    assert len(remarks(False)) == 2  # a run that goes on is not stopped
    open_store(request.output, None).write("build.json", b"{")
    assert remarks(True) == []
