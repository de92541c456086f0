"""The measured stages of a preparation, on a sample whose characters take several bytes."""

from __future__ import annotations

import json
from pathlib import Path

from electra_dist.corpus.inputs.find_inputs import search_inputs
from electra_dist.corpus.plan.corpus_rates import measure_preparation
from electra_dist.corpus.prepare.prepare_config import PrepareConfig


def test_the_size_of_the_sample_is_that_of_its_text_in_bytes(tmp_path: Path) -> None:
    texts = [f"Größe {number} und Höhe: übermäßig schöne Wörter, 東京 も 大きい." for number in range(20)]
    path = tmp_path / "sample.jsonl"
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    config = PrepareConfig.model_validate(
        {
            "output": "unused",
            "work": "unused",
            "sources": [{"name": "unused", "path": "unused"}],
            "filters": {},
            "deduplication": {"exact": {}, "minhash": None},
        }
    )

    rates = measure_preparation(config, search_inputs([path]).files, "body")

    assert [rate.stage for rate in rates][:2] == ["01-filter", "02-exact-signatures"]
    assert {rate.text_bytes for rate in rates} == {sum(len(text.encode()) for text in texts)}
    assert all(rate.cpu_s > 0 for rate in rates)
