"""Build the report's section of held-out text: what the generator replaced, and what was found."""

from __future__ import annotations

import html

from electra_dist.run.jsonl import Record
from electra_dist.run.text_samples import CONTINUATION


def samples_section(samples: Record | None) -> str:
    """Return the section with the texts of one evaluation; empty without samples.

    The background of a token shows the discriminator's probability that it was replaced. A replaced token is
    underlined, and the original follows it, crossed out. Each token has its probability as a tooltip.

    Args:
        samples: a record of samples.jsonl; None if there is none.
    """
    if samples is None:
        return ""
    paragraphs = ""
    for text in samples["texts"]:
        tokens = zip(text["original"], text["shown"], text["replaced_probability"])
        paragraphs += f"<p>{''.join(_token(*token) for token in tokens)}</p>\n"
    note = (
        f"Evaluation at step {samples['step']:,}. The darker a word, the more probable does the discriminator think "
        f"that it was replaced. Underlined: replaced by the generator, with the original crossed out after it. Point "
        f"at a word for the probability."
    )
    return (
        f'<h2>Held-out text as the discriminator sees it</h2>\n<div class="card samples">\n{paragraphs}</div>\n'
        f'<p class="note">{note}</p>\n'
    )


def _token(original: str, shown: str, probability: float) -> str:
    """Return one token as HTML, with a space before it unless it continues the word of the token before.

    Args:
        original: token of the corpus.
        shown: token that the discriminator read.
        probability: by the discriminator, that the token was replaced, in [0, 1].
    """
    space = "" if shown.startswith(CONTINUATION) else " "
    word = html.escape(shown.removeprefix(CONTINUATION))
    is_replaced = shown != original
    tag = "u" if is_replaced else "span"
    hint = f"replaced with probability {probability:.2f}"
    opacity = round(100 * 0.75 * probability)
    style = f"background:color-mix(in srgb,var(--series-2) {opacity}%,transparent)"
    token = f'{space}<{tag} title="{hint}" style="{style}">{word}</{tag}>'
    if is_replaced:
        token += f" <s>{html.escape(original.removeprefix(CONTINUATION))}</s>"
    return token
