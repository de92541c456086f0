"""Reading of treebanks in CoNLL-U format."""

from __future__ import annotations

from pathlib import Path

import pytest

from electra_dist.errors import UserError
from electra_dist.finetune.word_files import Sentence, read_conllu, read_treebank

CONLLU = """\
# sent_id = 1
1-2\tcan't\t_\t_\t_\t_\t_\t_\t_\t_
1\tca\tcan\tAUX\tMD\t_\t3\taux\t_\t_
2\tn't\tnot\tPART\tRB\t_\t3\tadvmod\t_\t_
3\tcome\tcome\tVERB\tVB\t_\t0\troot\t_\t_
3.1\tcome\tcome\tVERB\tVB\t_\t_\t_\t_\t_

# sent_id = 2
1\tboys\tboy\tNOUN\tNNS\t_\t0\troot\t_\t_
"""


def test_words_tags_and_heads_are_read_without_multiword_tokens_and_empty_nodes(tmp_path: Path) -> None:
    (tmp_path / "en_made-ud-train.conllu").write_text(CONLLU)
    (tmp_path / "test.conllu").write_text(CONLLU)

    treebank = read_treebank(tmp_path)

    first = Sentence(words=("ca", "n't", "come"), tags=("AUX", "PART", "VERB"), heads=(3, 3, 0))
    second = Sentence(words=("boys",), tags=("NOUN",), heads=(0,))
    assert treebank.train == treebank.test == [first, second]
    assert len(treebank.sample(1).train) == 1
    (tmp_path / "train.conllu").write_text(CONLLU)
    with pytest.raises(UserError, match=r"one file train.conllu or \*-train.conllu is needed, but the folder has"):
        read_treebank(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("\t3\taux", "\t4\taux", "line 3: word 1 has ID 1, UPOS AUX and HEAD 4"),
        ("\t3\taux", "\t1\taux", "HEAD 1; IDs must count"),
        ("NOUN", "_", "line 9: word 1 has ID 1, UPOS _"),
        ("\tMD\t", "\t", ":3: 9 columns in place of 10"),
    ],
)
def test_a_line_that_does_not_fit_the_format_is_an_error_with_its_number(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    file = tmp_path / "train.conllu"
    file.write_text(CONLLU.replace(old, new, 1))

    with pytest.raises(UserError, match=message):
        read_conllu(file)
