"""Compare the ids of tokenizer folders, each setting in each format, with those of transformers: equal, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from support.byte_level import byte_level_vocabulary
from transformers import AutoTokenizer

from electra_dist.errors import UserError
from electra_dist.pretrained.hugging_face_tokenizer import read_hugging_face_vocabulary
from electra_dist.tokenizer import SPECIAL_TOKENS, Vocabulary, new_tokenizer

ROLES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
WORDS = [
    *("the", "The", "##s", "dog", "ba", "##cker", "backer", "b\u00e4cker", "B\u00e4cker", "B", "##\u00e4cker", "un"),
    *("\u4e2d", "\u6587", "##\u6587", "\u4e2d\u6587", "end", "##end", "[", "]", "ent", "<", ">", "never", "split"),
    *("x", "##x", "<ent>", "dogs", ".", ",", "e", "##1", "New", "York", "new", "york", "\u0130", "istanbul", "_"),
    *("a", "b"),
]
TEXTS = [
    "The dogs B\u00e4cker b\u00e4cker ba\u0308cker \u4e2d\u6587 \u4e2dx end.",
    "New York <ent> the<ent>dog  <ENT> x\u200bx \u0130stanbul [E1] never_split\tun\u00a0end, \x07 dog",
    " a b ",
    "x" * 60 + " " + "x" * 101,
    "",
]
NUM_ROWS = 80  # of the embeddings, more than any of the vocabularies has tokens
Json = dict[str, Any]


def vocabulary() -> list[str]:
    """Return the tokens of a small vocabulary, in which every setting changes the ids of TEXTS."""
    return [*SPECIAL_TOKENS, *WORDS]


def bert_file(**settings: Any) -> Json:
    """Return the tokenizer.json of a WordPiece tokenizer like BERT's, with some settings of its normalizer."""
    ids = {token: token_id for token_id, token in enumerate(vocabulary())}
    content: Json = json.loads(tokenizers.BertWordPieceTokenizer(ids, lowercase=True).to_str())
    content["normalizer"] |= settings
    return content


def with_model(content: Json, **settings: Any) -> Json:
    """Return a tokenizer.json with some changed settings of its model."""
    return content | {"model": content["model"] | settings}


def token(content: str, token_id: int, **flags: bool) -> Json:
    """Return an added token as tokenizer.json writes it."""
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"id": token_id, "content": content, **dict.fromkeys(names, False), **flags}


def with_tokens(content: Json, *tokens: Json) -> Json:
    """Return a tokenizer.json with more added tokens."""
    return content | {"added_tokens": [*content["added_tokens"], *tokens]}


def template(single: str, pair: str) -> Json:
    """Return a post-processor for rows such as "[CLS]:0 $A:0 [SEP]:0"."""
    special = [(token, token_id) for token_id, token in enumerate(SPECIAL_TOKENS)]
    processor = tokenizers.processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    built = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    built.post_processor = processor
    result: Json = json.loads(built.to_str())["post_processor"]
    return result


BERT = {"tokenizer_class": "BertTokenizer"}
FAST = {"tokenizer_class": "PreTrainedTokenizerFast", **dict(zip(ROLES, SPECIAL_TOKENS, strict=True))}
NEW_ID = len(vocabulary())
DECLARED = {str(token_id): token(name, token_id, special=True) for token_id, name in enumerate(SPECIAL_TOKENS)}
ENTITY = token("<ent>", NEW_ID, lstrip=True, rstrip=True, normalized=True)
for declared in (*DECLARED.values(), entity := dict(ENTITY)):
    declared.pop("id")

# Settings of tokenizer_config.json that BERT's class obeys or ignores.
SETTINGS: dict[str, Json] = {
    "none": {},
    "cased": {"do_lower_case": False},
    "accents kept": {"strip_accents": False},
    "accents stripped": {"strip_accents": True, "do_lower_case": False},
    "cased accents kept": {"strip_accents": False, "do_lower_case": False},
    "Chinese words": {"tokenize_chinese_chars": False},
    "all at once": {"tokenize_chinese_chars": False, "strip_accents": False, "do_lower_case": False},
    "null": {"strip_accents": None},
    "ignored": {"never_split": ["never_split"], "do_basic_tokenize": False, "clean_text": False},
    "lengths": {"model_max_length": 4, "max_len": 4, "padding_side": "left", "truncation_side": "left"},
    "electra": {"tokenizer_class": "ElectraTokenizerFast", "strip_accents": False},
    "more special tokens": {"additional_special_tokens": ["[E1]", "<ent>"]},
    "extra special tokens": {"extra_special_tokens": ["[E1]"]},
    "named and listed": {"extra_special_tokens": {"one": "[E1]"}, "additional_special_tokens": ["<ent>"]},
    "listed twice": {"extra_special_tokens": ["[E1]"], "additional_special_tokens": ["<ent>"]},
    "named token": {"entity_token": "[E1]"},
    "objects": {"mask_token": {"__type": "AddedToken", "content": "[MASK]", "lstrip": True}},
    "another unknown token": {"unk_token": "un"},
    "a new unknown token": {"unk_token": "<unknown>"},
    "other ends": {"cls_token": "[", "sep_token": "]"},
    "declared": {"added_tokens_decoder": {**DECLARED, str(NEW_ID): entity}},
    "declared elsewhere": {"added_tokens_decoder": {**DECLARED, str(NEW_ID + 7): {**entity, "single_word": True}}},
    "split": {"split_special_tokens": True},
    "split more special tokens": {"split_special_tokens": True, "additional_special_tokens": ["[E1]"]},
}
# Files that are used as they are, by their change.
FILES: dict[str, Json] = {
    "like BERT": bert_file(),
    "accents kept in the file": bert_file(strip_accents=False),
    "Chinese words in the file": bert_file(handle_chinese_chars=False),
    "cased in the file": bert_file(lowercase=False),
    "control characters": bert_file(clean_text=False),
    "no normalizer": bert_file() | {"normalizer": None},
    "NFD": bert_file() | {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "Lowercase"}]}},
    "whitespace": bert_file() | {"pre_tokenizer": {"type": "WhitespaceSplit"}},
    "short words": with_model(bert_file(), max_input_chars_per_word=20),
    "prefix": with_model(bert_file(), continuing_subword_prefix="@@"),
    "unknown token": with_model(bert_file(), unk_token="un"),
    "added token": with_tokens(bert_file(), token("<ent>", NEW_ID, normalized=True)),
    "added token that eats spaces": with_tokens(bert_file(), ENTITY),
    "added word": with_tokens(bert_file(), token("dog", 8, single_word=True)),
    "added special token": with_tokens(bert_file(), token("[E1]", NEW_ID, special=True)),
    "added token with a space": with_tokens(bert_file(), token("New York", NEW_ID)),
    "truncation": bert_file()
    | {"truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}},
    "no template": bert_file() | {"post_processor": None},
    "template": bert_file()
    | {"post_processor": template("[CLS]:0 $A:0 [SEP]:0", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1")},
    "template without ends": bert_file() | {"post_processor": template("$A:0", "$A:0 $B:1")},
    "template of RoBERTa": bert_file()
    | {"post_processor": template("[CLS]:0 $A:0 [SEP]:0", "[CLS]:0 $A:0 [SEP]:0 [SEP]:0 $B:0 [SEP]:0")},
    "template with one type": bert_file()
    | {"post_processor": template("[CLS]:0 $A:0 [SEP]:0", "[CLS]:0 $A:0 [SEP]:0 $B:0 [SEP]:0")},
    "template with other ends": bert_file()
    | {"post_processor": template("[MASK] $A [SEP]", "[MASK] $A [SEP] $B [SEP]")},
    "byte-level": json.loads(byte_level_vocabulary().text),
    "dropout": with_model(json.loads(byte_level_vocabulary().text), dropout=0.1),
}
LINES: dict[str, str] = {
    "plain": "\n".join(vocabulary()) + "\n",
    "no line end": "\n".join(vocabulary()),
    "CRLF": "\r\n".join(vocabulary()) + "\r\n",
    "spaces": " \n".join(vocabulary()) + "\t\n",
    "no-break space": "\u00a0\n".join(vocabulary()),
    "blank": "\n\n".join(vocabulary()[:12]) + "\n\n\n" + "\n".join(vocabulary()[12:]) + "\n\n\n",
    "repeated": "\n".join([*vocabulary(), "the", "dog", "dog", "##s"]),
    "repeated special": "\n".join(["[UNK]", "[SEP]", *vocabulary()]),
    "mark": "\ufeff" + "\n".join(vocabulary()),
    "mark before a word": "\ufeffthe\n" + "\n".join(["x", *SPECIAL_TOKENS, *WORDS[1:]]),
}


def write_folder(folder: Path, files: dict[str, Json | str], model: str = "electra", num_rows: int = NUM_ROWS) -> Path:
    """Write the files of a tokenizer, and a config.json with the number of rows of embeddings; return the folder."""
    (folder / "config.json").write_text(json.dumps({"model_type": model, "vocab_size": num_rows}))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, "utf-8", newline="")
    return folder


def refusal(folder: Path) -> str:
    """Return the message with which the tokenizer of a folder is refused, which is one line."""
    with pytest.raises(UserError) as caught:
        read_hugging_face_vocabulary(folder)
    message = str(caught.value)
    assert message.startswith(str(folder))
    assert "\n" not in message
    return message


def check_equal(folder: Path) -> Vocabulary:
    """Compare the ids of TEXTS, and of a pair of them, with those of transformers; return the vocabulary."""
    read, lowercase = read_hugging_face_vocabulary(folder)
    ours = new_tokenizer(read, lowercase)
    theirs = AutoTokenizer.from_pretrained(folder)
    cls, sep = (read.special[role] for role in ("[CLS]", "[SEP]"))
    encoded = ours.encode(TEXTS)
    for text, ids in zip(TEXTS, encoded, strict=True):
        assert theirs(text)["input_ids"] == [cls, *ids, sep]
        assert ours.encode_with_offsets(text)[0] == ids
    pair = theirs(TEXTS[0], TEXTS[1], return_token_type_ids=True)
    assert pair["input_ids"] == [cls, *encoded[0], sep, *encoded[1], sep]
    if "modernbert" not in (folder / "config.json").read_text():  # it has no token types
        assert pair["token_type_ids"] == [0] * (len(encoded[0]) + 2) + [1] * (len(encoded[1]) + 1)
    assert (theirs.pad_token_id, theirs.mask_token_id) == (read.special["[PAD]"], read.special["[MASK]"])
    return read


FORMS = ["vocab.txt", "tokenizer.json", "tokenizer.json with another normalizer"]
EXACTLY_BERT = {"none", "cased", "cased accents kept", "null", "ignored", "lengths", "objects", "split"}
REFUSED_SETTINGS = {
    "a new unknown token": "no token <unknown>",
    "other ends": "encoded as the special token",
    "split more special tokens": "with split_special_tokens, [E1] in a text would not be found",
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("form", FORMS)
def test_every_setting_of_a_tokenizer_of_bert_gives_the_ids_of_transformers_or_is_refused(
    tmp_path: Path, name: str, form: str
) -> None:
    files: dict[str, Json | str] = {"tokenizer_config.json": BERT | SETTINGS[name]}
    if form == "vocab.txt":
        files["vocab.txt"] = LINES["plain"]
    else:
        files["tokenizer.json"] = bert_file() if form == "tokenizer.json" else bert_file(strip_accents=False)
    folder = write_folder(tmp_path, files)
    if name in REFUSED_SETTINGS:
        assert REFUSED_SETTINGS[name] in refusal(folder)
        return
    read = check_equal(folder)
    assert read.kind == ("wordpiece" if name in EXACTLY_BERT else "bpe")


ROWS = "its post_processor does not make rows"
REFUSED_FILES = {
    "electra": {
        "unknown token": "unk_token is [UNK], but the token with this role in the vocabulary is un",
        "no template": ROWS,
        "template without ends": ROWS,
        "template of RoBERTa": ROWS,
        "template with one type": ROWS,
        "template with other ends": "cls_token is [CLS], but the token with this role in the vocabulary is [MASK]",
        "byte-level": ROWS,  # its second texts have token type 0
        "dropout": "draws the tokens of a text at random",
    }
}
REFUSED_FILES["modernbert"] = {
    name: message
    for name, message in REFUSED_FILES["electra"].items()
    if name not in ("template with one type", "byte-level")
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("model", ["electra", "modernbert"])
def test_every_setting_of_a_tokenizer_json_gives_the_ids_of_transformers_or_is_refused(
    tmp_path: Path, name: str, model: str
) -> None:
    num_rows = byte_level_vocabulary().size if name in ("byte-level", "dropout") else NUM_ROWS
    files: dict[str, Json | str] = {"tokenizer.json": FILES[name], "tokenizer_config.json": FAST}
    folder = write_folder(tmp_path, files, model, num_rows)
    if name in REFUSED_FILES[model]:
        assert REFUSED_FILES[model][name] in refusal(folder)
    else:
        check_equal(folder)


@pytest.mark.parametrize("name", LINES)
def test_every_vocab_txt_gives_the_ids_of_transformers_or_is_refused(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path, {"vocab.txt": LINES[name]})
    if "mark" in name:
        assert "begins with a byte order mark" in refusal(folder)
    else:
        check_equal(folder)


@pytest.mark.parametrize("tokens", [["[E1]"], ["<ent>", "[E1]"]])
def test_tokens_of_older_files_are_added_as_transformers_adds_them(tmp_path: Path, tokens: list[str]) -> None:
    special: Json = {"additional_special_tokens": ["[E1]"], "mask_token": {"content": "[MASK]", "lstrip": True}}
    added: Json = {token: NEW_ID + number for number, token in enumerate(tokens)}
    files: dict[str, Json | str] = {"vocab.txt": LINES["plain"], "special_tokens_map.json": special}
    read = check_equal(write_folder(tmp_path, files | {"added_tokens.json": added}))
    assert read.ids["[E1]"] >= NEW_ID


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer_class": "RobertaTokenizer"}, "tokenizer_class RobertaTokenizer has rules of its own"),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, "tokenizer.json: is missing"),
        ({"do_lower_case": "yes"}, "do_lower_case is neither true nor false"),
        ({"tokenizer_class": 3}, "tokenizer_class is no name"),
        ({"added_tokens_decoder": {"a": {}}}, "a token in it cannot be read"),
        ({"added_tokens_decoder": {"9": {"special": True}}}, "a token in it cannot be read"),
        ({"additional_special_tokens": "[E1]"}, "a token in it cannot be read"),
        ({"extra_special_tokens": [3]}, "a token in it cannot be read"),
        ({"unk_token": ["[UNK]"]}, "a token in it cannot be read"),
        ({"extra_special_tokens": [f"[T{number}]" for number in range(NUM_ROWS)]}, "is outside"),
    ],
)
def test_settings_that_cannot_be_followed_are_refused_in_one_line(
    tmp_path: Path, settings: Json, message: str
) -> None:
    folder = write_folder(tmp_path, {"vocab.txt": LINES["plain"], "tokenizer_config.json": settings})
    assert message in refusal(folder)
