"""Read a tokenizer.json of Hugging Face's tokenizers, such as ModernBERT's byte-level BPE, and encode text with it.

Guarantee: encoding never yields [PAD], [CLS], [SEP] or [MASK], whatever the text holds: special tokens in a text are
encoded like any other text. A file whose special tokens can be reached from text is refused.

How: the five special tokens are found by their role. [CLS] and [SEP] are those that the file's post-processor puts
around a text; the others, and these without a post-processor, are found by the names that tokenizers in use give them.

Limits: normalisation and lower-casing are those of the file. Padding and truncation in it are switched off.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import tokenizers

from electra_dist.errors import UserError

# Role of a special token, by its name in BERT -> its names in other tokenizers.
_NAMES = {
    "[PAD]": ("[PAD]", "<pad>", "<|padding|>", "<|pad|>"),
    "[UNK]": ("[UNK]", "<unk>", "<|unk|>"),
    "[CLS]": ("[CLS]", "<cls>", "<s>", "<bos>", "<|startoftext|>", "<|begin_of_text|>"),
    "[SEP]": ("[SEP]", "<sep>", "</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>"),
    "[MASK]": ("[MASK]", "<mask>", "<|mask|>"),
}
_WORD_START = "\u0120"  # how byte-level tokens write the space before a word
_CONTINUATION = "##"  # how WordPiece marks a token that continues a word


def is_tokenizer_json(text: str) -> bool:
    """Return whether a text is a JSON object with a model, as every tokenizer.json is, and not a list of tokens."""
    if not text.lstrip().startswith("{"):
        return False
    try:
        content = json.loads(text)
    except ValueError:
        return False
    return isinstance(content, dict) and "model" in content


class TokenizerJson:
    """Tokens, special ids and encoder of a tokenizer.json."""

    def __init__(self, text: str, name: str) -> None:
        """Load and check a tokenizer.

        Args:
            text: content of the file.
            name: path or URL of the file, for messages.

        Raises:
            UserError: the file cannot be loaded, a special token is missing, or text can be encoded as one.
        """
        try:
            encoder = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # noqa: BLE001  (the library raises plain Exceptions)
            raise UserError(f"{name}: cannot be loaded as a tokenizer.json ({error}); copy the file again") from None
        encoder.no_padding()
        encoder.no_truncation()
        encoder.encode_special_tokens = True  # special tokens in a text are text
        self._encoder = encoder
        self.ids: dict[str, int] = encoder.get_vocab(with_added_tokens=True)
        self.tokens = _tokens_by_id(self.ids)
        self.special = _special_ids(self.ids, json.loads(text), name)
        self._check_specials_are_out_of_reach(name)

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each line, without special tokens; an empty line gives []."""
        encodings = self._encoder.encode_batch_fast(list(lines), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of one text and, for each id, the characters [start, end) of `text` that it stands for.

        The space before a word is not counted to the word, although byte-level tokens contain it.
        """
        encoding = self._encoder.encode(text, add_special_tokens=False)
        offsets = []
        for start, end in encoding.offsets:
            has_text = bool(text[start:end].strip())
            while has_text and text[start].isspace():
                start += 1
            offsets.append((start, end))
        return encoding.ids, offsets

    def shown_tokens(self) -> list[str]:
        """Return the tokens for people to read, by id: a token that continues a word begins with ## as in WordPiece.

        Bytes of byte-level tokens become characters; those that are no whole character become U+FFFD.
        """
        if not any(token.startswith(_WORD_START) for token in self.tokens):
            return self.tokens
        special_ids = set(self.special.values())
        byte_of = _byte_of_character()
        return [
            token if token_id in special_ids else _shown(token, byte_of) for token_id, token in enumerate(self.tokens)
        ]

    def for_hugging_face(self) -> str:
        """Return the content of a tokenizer.json that puts [CLS] and [SEP] around texts and pairs of texts."""
        content = json.loads(self._encoder.to_str())
        if content.get("post_processor") is None or content["post_processor"]["type"] == "ByteLevel":
            cls, sep = self.tokens[self.special["[CLS]"]], self.tokens[self.special["[SEP]"]]
            self._encoder.post_processor = tokenizers.processors.TemplateProcessing(
                single=f"{cls} $A {sep}",
                pair=f"{cls} $A {sep} $B {sep}",
                special_tokens=[(cls, self.special["[CLS]"]), (sep, self.special["[SEP]"])],
            )
        return self._encoder.to_str(pretty=False)

    def _check_specials_are_out_of_reach(self, name: str) -> None:
        """Raise UserError if the text of a special token is encoded as a special token other than [UNK]."""
        reserved = {token_id: token for token, token_id in self.special.items() if token != "[UNK]"}
        for token_id, role in reserved.items():
            text = self.tokens[token_id]
            for line in (text, f"a {text} b", f"a{text}b"):
                if reserved.keys() & set(self.encode([line])[0]):
                    raise UserError(
                        f"{name}: the characters {text} in a text are encoded as the special token {role}; give "
                        f"another tokenizer, whose model does not reach its special tokens"
                    )


def _tokens_by_id(ids: dict[str, int]) -> list[str]:
    """Return the tokens in the order of their ids; an id without a token gets one that no text has."""
    tokens = [f"<no token {token_id}>" for token_id in range(max(ids.values(), default=-1) + 1)]
    for token, token_id in ids.items():
        tokens[token_id] = token
    return tokens


def _special_ids(ids: dict[str, int], content: dict[str, Any], name: str) -> dict[str, int]:
    """Return the ids of the five special tokens by their names in BERT.

    Args:
        ids: id of each token.
        content: the parsed tokenizer.json.
        name: path or URL of the file, for messages.

    Raises:
        UserError: no token has one of the roles.
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
    """Return the tokens that a post-processor puts before and after a text, by the roles [CLS] and [SEP].

    Args:
        post_processor: entry of a tokenizer.json; None and kinds that put no tokens there give {}.
    """
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


def _shown(token: str, byte_of: dict[str, int]) -> str:
    """Return a byte-level token as WordPiece would write it, by the byte that each of its characters stands for."""
    is_word_start = token.startswith(_WORD_START)
    known = all(character in byte_of for character in token)
    text = bytes(byte_of[character] for character in token).decode(errors="replace") if known else token
    return text.removeprefix(" ") if is_word_start else _CONTINUATION + text


def _byte_of_character() -> dict[str, int]:
    """Return the byte that each character of byte-level tokens stands for (GPT-2's table, which all of them use).

    Printable bytes of Latin-1 are their own characters; the others, in ascending order, are those from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    byte_of = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in byte_of]
    byte_of |= {chr(0x100 + number): byte for number, byte in enumerate(others)}
    return byte_of
