"""Read a tokenizer.json of Hugging Face's tokenizers, such as ModernBERT's byte-level BPE, and encode text with it.

Guarantee: encoding never yields [PAD], [CLS], [SEP] or [MASK], whatever the text contains, because the name of a
special token in a text is encoded like any other text. A file for which this does not hold is refused.

How: in this project the five special tokens have the names that BERT gives them; in the file they may have others.
[CLS] and [SEP] are the tokens that the file's post-processor puts before and after a text. If it has no post-processor
that does so, they are found by the names that they have in common tokenizers, like the other three.

Limits: normalisation and lower-casing are those of the file. Its settings for padding and truncation are ignored. A
special token of the file without one of the five roles, such as a marker of entities, is found in text like any other
added token.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from electra_dist.errors import UserError

if TYPE_CHECKING:  # Commands that encode no text answer sooner.
    import tokenizers

# Role of a special token, which is its name in BERT -> its names in common tokenizers, the preferred one first.
_NAMES = {
    "[PAD]": ("[PAD]", "<pad>", "<|padding|>", "<|pad|>"),
    "[UNK]": ("[UNK]", "<unk>", "<|unk|>"),
    "[CLS]": ("[CLS]", "<cls>", "<s>", "<bos>", "<|startoftext|>", "<|begin_of_text|>"),
    "[SEP]": ("[SEP]", "<sep>", "</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>"),
    "[MASK]": ("[MASK]", "<mask>", "<|mask|>"),
}
_WORD_START = "\u0120"  # character that stands for the space before a word in byte-level tokens
_CONTINUATION = "##"  # prefix of a token that continues a word in WordPiece


def one_text_error(text: str) -> UserError:
    """Return, not raise, the error for a caller who passes `encode` one text in place of a list of texts."""
    return UserError(f"encode: the argument lines is {text[:60]!r}, one text; pass a list of texts")


class TokenizerJson:
    """A loaded tokenizer.json: its tokens and their ids, its special tokens, and an encoder of text.
    It encodes text with the methods of `WordPieceTokenizer` (`tokenizer.py`).

    Attributes:
        ids: Token -> id, with added and special tokens.
        tokens: The tokens in the order of their ids.
        special: BERT's name of each special token, such as "[CLS]" -> id of the token that the file uses for it.
    """

    lowercase = False  # any lower-casing is part of the file

    def __init__(self, text: str, name: str) -> None:
        """Parse a file; raise UserError if it is damaged, lacks a special token, or encodes the name of one as it."""
        content = json.loads(text)
        tokenizer = _load(text, name)
        self._text = text
        self.ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        self.tokens = _tokens_by_id(self.ids)
        self.special = _special_ids(self.ids, content, name)
        _check_model(content["model"], name)
        self._encoder = _encoder_of_text(tokenizer, content, self.special, name)
        self._check_specials_are_out_of_reach(name)
        first, second, both = self.encode(["a", "b", "a b"])
        # Byte-level tokens contain the space before a word, so the space must be there; WordPiece drops it.
        self._line_end = "" if first + second == both else " "

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each line, without special tokens; a line without tokens gives []."""
        if isinstance(lines, str):
            raise one_text_error(lines)
        encodings = self._encoder.encode_batch_fast(list(lines), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text and, for each id, the range [start, end) of characters that it was made from.
        A byte-level token may contain the space before its word. The range leaves out this space, if text follows.
        """
        encoding = self._encoder.encode(text, add_special_tokens=False)
        offsets = []
        for start, end in encoding.offsets:
            has_text = bool(text[start:end].strip())
            while has_text and text[start].isspace():
                start += 1
            offsets.append((start, end))
        return encoding.ids, offsets

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Encode the words of one text together; return each word's ids. A token may include the space before a word.
        A token with parts of two words, or with only the space between them, belongs to the first word.
        """
        starts = list(itertools.accumulate((len(word) + 1 for word in words[:-1]), initial=0))
        ids_of_words: list[list[int]] = [[] for _ in words]
        ids, offsets = self.encode_with_offsets(" ".join(words))
        for token_id, (start, _) in zip(ids, offsets, strict=True):
            ids_of_words[bisect.bisect_right(starts, start) - 1].append(token_id)
        return ids_of_words

    def continues_word(self, lines: Sequence[str]) -> list[list[bool]]:
        """Return for each token of each line whether it belongs to the same word as the token before it.
        Words are those of the file's pre-tokenizer, which also cuts at punctuation.
        """
        continued = []
        for encoding in self._encoder.encode_batch(list(lines), add_special_tokens=False):
            words = encoding.word_ids
            continued.append([word is not None and word == before for before, word in zip([None, *words], words)])
        return continued

    def split_lines(self, text: str) -> list[str]:
        """Split a text into lines; their ids, one after another, are those of the text with spaces for line ends.
        If tokens of this tokenizer contain spaces, each line begins with the space that replaces the line end before
        it. A line of only white space is joined to the next line, and left out at the end of the text.
        """
        lines = []
        line_and_space = ""
        for line in text.splitlines():
            line_and_space += line
            if line.strip():
                lines.append(line_and_space)
                line_and_space = ""
            line_and_space += self._line_end
        return lines

    def shown_tokens(self) -> list[str]:
        """Return the tokens in the order of their ids, as a person reads them.
        Byte-level tokens are decoded: a token that continues a word begins with ##, and a part of a character becomes
        U+FFFD. Special tokens, and the tokens of other kinds of tokenizers, are unchanged.
        """
        is_byte_level = any(token.startswith(_WORD_START) for token in self.tokens)
        if not is_byte_level:
            return self.tokens
        special_ids = set(self.special.values())
        byte_of = _byte_of_character()
        shown = []
        for token_id, token in enumerate(self.tokens):
            shown.append(token if token_id in special_ids else _decoded(token, byte_of))
        return shown

    def for_hugging_face(self) -> str:
        """Return the tokenizer.json of an exported model, as text; it puts [CLS] and [SEP] around each text.
        A post-processor that gives other rows or token types than this project is replaced.
        """
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_str(self._text)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        cls, sep = (self.tokens[self.special[role]] for role in ("[CLS]", "[SEP]"))
        if ends_of_rows(json.loads(self._text).get("post_processor"), with_types=True) != (cls, sep):
            tokenizer.post_processor = rows_of_bert(cls, sep, self.ids)
        return tokenizer.to_str(pretty=False)

    def _check_specials_are_out_of_reach(self, name: str) -> None:
        """Raise UserError if a text can contain [PAD], [CLS], [SEP] or [MASK]: if their names are encoded as them."""
        reserved = {token_id: token for token, token_id in self.special.items() if token != "[UNK]"}
        for token_id, role in reserved.items():
            text = self.tokens[token_id]
            for line in (text, f"a {text} b", f"a{text}b"):
                if reserved.keys() & set(self.encode([line])[0]):
                    raise UserError(
                        f"{name}: the characters {text} in a text are encoded as the special token {role}; give "
                        f"another tokenizer, whose model does not reach its special tokens"
                    )


def rows_of_bert(cls: str, sep: str, ids: dict[str, int]) -> tokenizers.processors.PostProcessor:
    """Return the post-processor that makes `cls A sep` of a text A, and `cls A sep B sep` of two, types 0 and 1."""
    import tokenizers

    return tokenizers.processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(token, ids[token]) for token in (cls, sep)],
    )


def ends_of_rows(post_processor: dict[str, Any] | None, with_types: bool) -> tuple[str, str] | None:
    """Return the tokens (X, Y) with which a post-processor makes `X A Y` of a text A and `X A Y B Y` of texts A and B.
    Returns None if it forms other rows. With `with_types`, B and the Y after it must have token type 1, and everything
    before them type 0.
    """
    if post_processor is None:
        return None
    if post_processor["type"] == "BertProcessing":
        return post_processor["cls"][0], post_processor["sep"][0]
    if post_processor["type"] == "Sequence":
        parts = [part for part in post_processor["processors"] if part["type"] != "ByteLevel"]
        return ends_of_rows(parts[0], with_types) if len(parts) == 1 else None
    return _ends_of_template(post_processor, with_types) if post_processor["type"] == "TemplateProcessing" else None


def _ends_of_template(template: dict[str, Any], with_types: bool) -> tuple[str, str] | None:
    pair = [next(iter(piece.values())) for piece in template["pair"]]  # {"id": ..., "type_id": ...}
    names = [piece["id"] for piece in pair]
    names_of_single = [next(iter(piece.values()))["id"] for piece in template["single"]]
    if len(names) != 5 or names_of_single != names[:3]:
        return None
    cls, first, sep, second, last = names
    if (first, second, sep) != ("A", "B", last):
        return None
    if with_types and [piece["type_id"] for piece in pair] != [0, 0, 0, 1, 1]:
        return None
    has_one_id = all(len(template["special_tokens"][name]["ids"]) == 1 for name in (cls, sep))
    return (cls, sep) if has_one_id else None


def _load(text: str, name: str) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001  (the library raises plain Exceptions)
        raise UserError(f"{name}: cannot be loaded as a tokenizer.json ({error}); copy the file again") from None


def _check_model(model: dict[str, Any], name: str) -> None:
    unknown = model.get("unk_token")
    if model.get("type") in ("WordPiece", "WordLevel") and unknown not in model["vocab"]:
        raise UserError(f"{name}: its model has no token {unknown} (unk_token) for unknown words; copy the file again")
    if model.get("dropout"):
        raise UserError(
            f"{name}: model.dropout draws the tokens of a text at random; set it to null, as for a trained model"
        )


def _encoder_of_text(
    tokenizer: tokenizers.Tokenizer, content: dict[str, Any], special: dict[str, int], name: str
) -> tokenizers.Tokenizer:
    """Return a tokenizer that encodes the names of the five special tokens in a text like other text.
    The library can do so only for all special tokens of a file together. Special tokens other than these five are
    therefore changed to ordinary added tokens in `content`.
    """
    others = [token for token in content.get("added_tokens") or () if token["special"]]
    others = [token for token in others if token["id"] not in special.values()]
    if others:
        for token in others:
            token["special"] = False
        tokenizer = _load(json.dumps(content), name)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _tokens_by_id(ids: dict[str, int]) -> list[str]:
    """Return the tokens in the order of their ids, with a placeholder for an id without a token."""
    tokens = [f"<no token {token_id}>" for token_id in range(max(ids.values(), default=-1) + 1)]
    for token, token_id in ids.items():
        tokens[token_id] = token
    return tokens


def _special_ids(ids: dict[str, int], content: dict[str, Any], name: str) -> dict[str, int]:
    """Return the id of each special token by its role, such as "[CLS]"; raise UserError if a role has no token.

    The file `name`, with the JSON `content`, may declare the token; otherwise a common name of it is looked for.
    """
    special = {}
    for role, names in _NAMES.items():
        known = [token for token in names if token in ids]
        if known:
            special[role] = ids[known[0]]
    unknown_token = content["model"].get("unk_token")
    if unknown_token in ids:
        special["[UNK]"] = ids[unknown_token]
    for role, token in _ends_of_a_text(content.get("post_processor")).items():
        if token in ids:
            special[role] = ids[token]
    missing = [role for role in _NAMES if role not in special]
    if missing:
        raise UserError(
            f"{name}: no token has the role of {', '.join(missing)}; give the tokenizer.json of a model such as "
            f"ModernBERT or RoBERTa, or train one with `electra-dist corpus vocab --tokenizer bpe`"
        )
    return {role: special[role] for role in _NAMES}


def _ends_of_a_text(post_processor: dict[str, Any] | None) -> dict[str, str]:
    """Return {"[CLS]": first, "[SEP]": last} if a post-processor puts special tokens around a text; otherwise {}."""
    if post_processor is None:
        return {}
    kind = post_processor.get("type")
    if kind in ("BertProcessing", "RobertaProcessing"):
        return {"[CLS]": post_processor["cls"][0], "[SEP]": post_processor["sep"][0]}
    if kind == "TemplateProcessing":
        template = post_processor["single"]
        if len(template) > 1 and "SpecialToken" in template[0] and "SpecialToken" in template[-1]:
            return {"[CLS]": template[0]["SpecialToken"]["id"], "[SEP]": template[-1]["SpecialToken"]["id"]}
    if kind == "Sequence":
        for processor in post_processor["processors"]:
            ends = _ends_of_a_text(processor)
            if ends:
                return ends
    return {}


def _decoded(token: str, byte_of: dict[str, int]) -> str:
    """Decode a byte-level token to readable text: remove a space at its beginning or, without one, prefix ##."""
    text = token
    is_byte_level = all(character in byte_of for character in token)  # False for some added tokens
    if is_byte_level:
        text = bytes(byte_of[character] for character in token).decode(errors="replace")
    if token.startswith(_WORD_START):
        return text.removeprefix(" ")
    return _CONTINUATION + text


def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's table, which all byte-level tokenizers use: character in a token -> byte that it stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    byte_of = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in byte_of]
    byte_of |= {chr(0x100 + number): byte for number, byte in enumerate(others)}
    return byte_of
