"""`electra-dist verify` says in words how often the rows of a corpus were used."""

import pytest
from electra_launcher.cli.verify import _use_of_rows


@pytest.mark.parametrize(
    ("num_used", "words"),
    [
        (0, "none yet"),
        (80, "80 of the 640 rows of the corpus, each once"),
        (640, "each of the 640 rows of the corpus once"),
        (1280, "each of the 640 rows of the corpus 2 times"),
        (2000, "80 of the 640 rows of the corpus 4 times, the other 560 rows 3 times"),
    ],
)
def test_the_use_of_rows_is_said_for_no_row_a_part_and_several_epochs(num_used: int, words: str) -> None:
    assert _use_of_rows(num_used, 640) == words
