"""Build the report's section of held-out text: which tokens were replaced, and which the discriminator suspects."""

from __future__ import annotations

from collections.abc import Sequence

from electra_dist.escapes import html_text
from electra_dist.run.metrics import CONTINUATION, Samples

Token = tuple[str, str, float]  # token of the corpus, token that the discriminator read, its P(replaced)

_MAX_OPACITY_PERCENT = 75  # of the background of a token that is surely replaced; text stays readable on it


def samples_section(samples: Samples | None) -> str:
    """Return the section with the texts of one evaluation (a record of samples.jsonl); "" if `samples` is None.
    The background of a token and its tooltip show the discriminator's probability that the token was replaced. A
    replaced token is underlined, and the crossed-out original word follows.
    """
    if samples is None:
        return ""
    paragraphs = ""
    for text in samples.texts:
        tokens = list(zip(text.original, text.shown, text.replaced_probability))
        paragraphs += f"<p>{' '.join(_word(word) for word in _words(tokens))}</p>\n"
    note = (
        f"Evaluation at step {samples.step:,}. The darker a word, the more probable does the discriminator think "
        f"that it was replaced. Underlined: replaced by the generator, with the original crossed out after it. Point "
        f"at a word for the probability."
    )
    return (
        f'<h2>Held-out text as the discriminator sees it</h2>\n<div class="card samples">\n{paragraphs}</div>\n'
        f'<p class="note">{note}</p>\n'
    )


def _words(tokens: Sequence[Token]) -> list[list[Token]]:
    """Group the tokens into words; a token that begins with "##", as the discriminator read it, continues a word."""
    words: list[list[Token]] = []
    for token in tokens:
        _original, shown, _probability = token
        if shown.startswith(CONTINUATION) and words:
            words[-1].append(token)
        else:
            words.append([token])
    return words


def _word(tokens: Sequence[Token]) -> str:
    """Return a word as HTML; if one of its tokens was replaced, the original word follows, crossed out."""
    word = "".join(_token(*token) for token in tokens)
    if all(shown == original for original, shown, _probability in tokens):
        return word
    original_word = "".join(original.removeprefix(CONTINUATION) for original, _shown, _probability in tokens)
    return f"{word} <s>{html_text(original_word)}</s>"


def _token(original: str, shown: str, probability: float) -> str:
    """Return one token as HTML: underlined if it was replaced, and darker the higher its `probability` is."""
    tag = "u" if shown != original else "span"
    opacity_percent = round(_MAX_OPACITY_PERCENT * probability)
    style = f"background:color-mix(in srgb,var(--series-2) {opacity_percent}%,transparent)"
    hint = f"replaced with probability {probability:.2f}"
    return f'<{tag} title="{hint}" style="{style}">{html_text(shown.removeprefix(CONTINUATION))}</{tag}>'
