"""The model card is made of the run's own figures, and text of others in it stays text."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from support.checkpoints import state_at
from support.hostile_text import HOSTILE, SHOWN

from electra_dist.config.load import load_config
from electra_dist.pretrained.export import Export
from electra_dist.report.model_card import model_card

CONFIGS = Path(__file__).parents[2] / "configs"


def export(*changes: str, fingerprint: str = "c" * 64) -> Export:
    config = load_config(CONFIGS / "demo_cpu_bert.yaml", changes)
    state = state_at(step=50, corpus_fingerprint=fingerprint)
    return Export(config=config, state=state, steps=(50,), folders={"discriminator": Path("discriminator")})


@pytest.mark.parametrize(
    ("changes", "peak"),
    [
        # The largest of lr * min(1, t / 100) * (1 - t / 1000) ** power over all t, computed one by one below.
        (["optimizer.lr=0.001"], None),
        (["optimizer.lr=0.001", "optimizer.warmup_steps=900"], None),
        (["optimizer.lr=0.001", "optimizer.decay_power=0"], 0.001),
        (["optimizer.lr=0.001", "optimizer.shape=trapezoid", "optimizer.decay_steps=100"], 0.001),
    ],
)
def test_the_peak_of_the_learning_rate_is_the_largest_that_a_step_has(changes: list[str], peak: float | None) -> None:
    given = export("train.num_steps=1000", "optimizer.warmup_steps=100", *changes)
    optimizer = given.config.optimizer
    if peak is None:
        warmup, power = optimizer.warmup_steps, optimizer.decay_power
        peak = max(0.001 * min(1, t / warmup) * (1 - t / 1000) ** power for t in range(1000))
        assert peak < 0.001
    card = model_card("discriminator", "run", given, [], {}, "unknown")
    [shown] = [line.split("|")[2].split()[0] for line in card.splitlines() if line.startswith("| learning rate |")]
    assert math.isclose(float(shown), peak, rel_tol=1e-5)


def test_the_card_of_the_head_that_predicts_tokens_says_that_it_has_never_read_mask() -> None:
    card = model_card("masked_lm", "run", export(), [], {}, "unknown")
    assert "pipeline_tag: fill-mask" in card
    assert "AutoModelForMaskedLM.from_pretrained" in card
    assert "The discriminator with the head that predicts tokens of an ELECTRA model" in card
    assert "never the token [MASK]" in card


def test_text_of_others_is_plain_text_of_the_card() -> None:
    """They are names and licences of build.json and environment.json, a fingerprint, and the name of the folder."""
    phases = [{"from_step": 0, "fingerprint": HOSTILE, "rows": 100, "tokens": 1000}]
    phases.append({**phases[0], "from_step": 20})
    sources = {f"/data/<b>{HOSTILE}": {"tokens": 5, "licence": "[x](javascript:alert(1)) <script>`|\r\n"}}
    sources |= {"a\n\n# b": {"tokens": 5, "licence": HOSTILE}}
    versions = {HOSTILE: "2 | <img src=x onerror=y>", "torch": "[2](data:text/html,x)"}
    environment = {"versions": versions, "corpus": {"phases": phases, "sources": sources}}
    card = model_card("discriminator", f"run {HOSTILE}", export(), [], environment, "unknown")
    alone = model_card("discriminator", HOSTILE, export(fingerprint=HOSTILE), [], {}, "unknown")

    for page in (card, alone):
        assert page.replace("\n", "").isprintable()
        body = page.split("---\n", 2)[2]
        tokens = MarkdownIt("commonmark").enable("table").parse(body)
        inline = [child for token in tokens for child in token.children or []]
        assert {child.type for child in inline} <= {"text", "text_special", "code_inline", "link_open", "link_close"}
        links = [child.attrs["href"] for child in inline if child.type == "link_open"]
        assert links == ["https://arxiv.org/abs/2003.10555"]
        assert not [token for token in tokens if token.type == "html_block"]
        headings = [token.tag for token in tokens if token.type == "heading_open"]
        assert headings.count("h1") == 1
    assert SHOWN in "".join(text.content for text in inline)
    rows = [line for line in card.splitlines() if line.startswith("| ")]
    assert any("not stated" not in row and "&lt;script&gt;" in row for row in rows)
