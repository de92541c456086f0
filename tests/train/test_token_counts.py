"""Token counts of a corpus are exact, counted once for a run, and taken from the corpus manifest if it has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.real_runs import VOCAB_SIZE, synthetic_rows, tiny_tree, write_corpus

from electra_dist.config import Config
from electra_dist.data.corpora import Corpora
from electra_dist.data.shard_cache import open_cache
from electra_dist.engine.process_group import init_distributed
from electra_dist.errors import UserError
from electra_dist.store.open_store import open_store
from electra_dist.train.token_counts import unigram_counts


@pytest.fixture
def run(tmp_path: Path) -> tuple[Config, Corpora, np.ndarray]:
    """The config and corpus of a run, and the true count of each token id."""
    init_distributed()
    manifest = write_corpus(str(tmp_path / "corpus"), [20, 7, 33])
    rows = np.concatenate([synthetic_rows(count, number) for number, count in enumerate([20, 7, 33])])
    config = Config.model_validate(tiny_tree(tmp_path / "run", str(tmp_path / "corpus")))
    corpus = Corpora.of(open_store(str(tmp_path / "corpus")), manifest)
    return config, corpus, np.bincount(rows.flatten(), minlength=VOCAB_SIZE)


def counts_of(config: Config, corpus: Corpora) -> np.ndarray:
    """Return the counts as a run computes them."""
    return unigram_counts(
        corpus,
        config.model.vocab_size,
        Path(config.run_dir),
        lambda: open_cache(corpus, config.data, config.cache_folder),
    )


def test_every_id_of_every_row_is_counted_once_and_the_counts_are_stored(run: Any) -> None:
    config, corpus, truth = run
    np.testing.assert_array_equal(counts_of(config, corpus), truth)
    for shard in corpus.shards:
        shard.local_path.unlink()
    np.testing.assert_array_equal(counts_of(config, corpus), truth)  # from the run folder


def test_counts_of_an_earlier_start_that_have_changed_are_never_used(run: Any) -> None:
    config, corpus, truth = run
    counts_of(config, corpus)
    [file] = Path(config.run_dir).glob("token_counts-*.npy")
    assert np.load(file).tolist() == truth.tolist()
    written = file.read_bytes()

    exchanged = truth.copy()
    exchanged[[5, 6]] = exchanged[[6, 5]] + [1, -1]
    for content in (written.replace(truth.tobytes(), exchanged.tobytes()), written[:-1], written[:-8], written + b"x"):
        assert content != written
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"token_counts-.*: damaged, .*delete it") as caught:
            counts_of(config, corpus)
        assert "\n" not in str(caught.value)

    file.unlink()
    np.testing.assert_array_equal(counts_of(config, corpus), truth)
    assert file.read_bytes() == written
