"""Train a byte-level BPE tokenizer reproducibly, and choose between it and WordPiece.

Guarantee: the same texts give the same tokenizer.json. Every text can be encoded without [UNK], because all 256 bytes
are tokens. Case, accents and spaces are kept.

How: Hugging Face's `BpeTrainer` is trained on the lines of the texts, which are cut into words as for GPT-2. The ids
of the tokens depend on the counts in the texts and on the order of the special tokens and bytes alone.

Source: Radford et al., "Language models are unsupervised multitask learners", 2019, section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import tokenizers

from electra_dist.corpus.vocab import train_vocabulary
from electra_dist.errors import UserError
from electra_dist.tokenizer import SPECIAL_TOKENS, Vocabulary

TokenizerKind = Literal["wordpiece", "bpe"]
_NUM_BYTES = 256


def train_kind(
    kind: TokenizerKind, texts: Callable[[], Iterable[str]], vocab_size: int, lowercase: bool
) -> Vocabulary:
    """Train a WordPiece or a byte-level BPE vocabulary, as `kind` (the config key `corpus.tokenizer`) says.

    Each call of `texts` must yield all texts from the first one; WordPiece calls it twice. Few or short texts may give
    fewer tokens than `vocab_size`. `lowercase` affects WordPiece only. Raises UserError if the texts are empty or
    `vocab_size` is too small.
    """
    if kind == "bpe":
        return train_byte_level_bpe(texts(), vocab_size)
    return train_vocabulary(texts, vocab_size, lowercase)


def train_byte_level_bpe(texts: Iterable[str], vocab_size: int) -> Vocabulary:
    """Train a byte-level BPE tokenizer of at most `vocab_size` tokens: special tokens, the 256 bytes, merged pairs.

    The vocabulary's text is a tokenizer.json that Hugging Face's libraries can load. Raises UserError if the texts are
    empty or `vocab_size` is too small.
    """
    smallest_size = len(SPECIAL_TOKENS) + _NUM_BYTES
    if vocab_size < smallest_size:
        raise UserError(
            f"a byte-level vocabulary of {vocab_size} entries has no room for the special tokens and the bytes: at "
            f"least {smallest_size} are needed; raise --size (`corpus vocab`) or model.vocab_size (`corpus build`)"
        )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    num_lines = 0

    def lines() -> Iterator[str]:
        nonlocal num_lines
        for text in texts:
            for number, line in enumerate(text.splitlines()):
                num_lines += 1
                yield line if number == 0 else " " + line  # as in a corpus, where a line end is a space

    tokenizer.train_from_iterator(lines(), trainer)
    if not num_lines:
        raise UserError("a vocabulary cannot be trained: the input has no text; correct --input or --text-field")
    ids_of_template = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ids_of_template
    )
    return Vocabulary(tokenizer.to_str(pretty=False) + "\n", "trained vocabulary")
