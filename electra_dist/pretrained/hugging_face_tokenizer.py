"""Read the tokenizer of a model in a local folder of Hugging Face's format.

Guarantee: a text gets the ids that transformers gives it, or the folder is refused. One thing differs on purpose: the
names of the five special tokens in a text, such as [MASK], are text.

How: transformers is not imported. For an ELECTRA model its class BertTokenizer takes the tokens from tokenizer.json or
vocab.txt, and all rules from tokenizer_config.json, whatever tokenizer.json says about them. For a ModernBERT, or if
tokenizer_config.json names a general class, tokenizer.json is used as it is. Both add the tokens that
tokenizer_config.json, special_tokens_map.json and added_tokens.json name. The same tokenizer is built here with the
library `tokenizers`. Where it is exactly BERT's, it becomes a vocab.txt, otherwise a tokenizer.json.

Source: transformers 5, `TokenizersBackend`, `BertTokenizer` and `AutoTokenizer.from_pretrained`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from electra_dist.errors import UserError
from electra_dist.pretrained.hf import MODERNBERT
from electra_dist.pretrained.hf_folders import PRETRAINING_FILE, check_tokenizer_files
from electra_dist.store.atomic_files import read_regular, readable
from electra_dist.store.json_file import read_json_object
from electra_dist.tokenizer import BYTE_ORDER_MARK, MAX_WORD_CHARS, SPECIAL_TOKENS, VOCAB_FILE, Vocabulary
from electra_dist.tokenizer_json import ends_of_rows, rows_of_bert

_AGAIN = "download or export the model again"  # next step in messages about a damaged file
_TOKENIZER_FILE = "tokenizer.json"
_SETTINGS_FILE = "tokenizer_config.json"
# Names of classes, without the ending Fast of older versions.
_BERT_CLASSES = (None, "BertTokenizer", "ElectraTokenizer")
_GENERAL_CLASSES = ("PreTrainedTokenizer", "TokenizersBackend")
# Names in tokenizer_config.json -> the role, which is the name that the special token has in BERT.
_ROLES = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL_TOKENS}
_OTHER_NAMES = ("bos_token", "eos_token")
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class _Folder(NamedTuple):
    """Parsed JSON files in a model's folder that describe its tokenizer; a missing file is {}."""

    path: Path
    model: dict[str, Any]  # config.json
    settings: dict[str, Any]  # tokenizer_config.json, with the tokens of special_tokens_map.json
    tokenizer: dict[str, Any]  # tokenizer.json
    added_tokens: dict[str, Any]  # added_tokens.json

    def file(self, name: str) -> Path:
        return self.path / name


def read_hugging_face_vocabulary(path: Path) -> tuple[Vocabulary, bool]:
    """Return the vocabulary of a Hugging Face folder, and whether its tokenizer lower-cases text.

    If the tokenizer is not exactly BERT's, the vocabulary is a tokenizer.json, which itself decides about lower case;
    the second result is then False. The files of an export are verified against the digests in its pretraining.json.
    In models of other programs, which have no such digests, a vocab.txt beside the tokenizer.json of a WordPiece must
    have the same tokens.
    """
    check_tokenizer_files(path)
    folder = _read_folder(path)
    has_file = bool(folder.tokenizer)
    if not has_file and not folder.file(VOCAB_FILE).exists():
        raise UserError(
            f"{path}: holds neither tokenizer.json nor {VOCAB_FILE}; copy the model's own tokenizer files there"
        )
    source = folder.file(_TOKENIZER_FILE if has_file else VOCAB_FILE)
    is_general = _is_general(folder)
    try:
        tokenizer = _general_tokenizer(folder) if is_general else _bert_tokenizer(folder)
        _add_tokens(tokenizer, folder)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise _damaged(folder.file(_SETTINGS_FILE), f"a token in it cannot be read ({error})") from None
    _check_ids(folder, source, tokenizer)
    if not is_general:
        _check_same_tokens(folder, tokenizer.get_vocab(with_added_tokens=False))
    content = json.loads(tokenizer.to_str())
    lines = _lines_of_bert(content)
    if lines is not None:
        return Vocabulary(lines, str(source)), content["normalizer"]["lowercase"]
    vocabulary = Vocabulary(tokenizer.to_str(), str(source))
    _check_roles(folder, vocabulary)
    _check_ends(folder, vocabulary, content)
    _check_added_tokens_are_found(folder, vocabulary, content)
    return vocabulary, False


def _read_folder(path: Path) -> _Folder:
    """Read the JSON files of a Hugging Face folder that describe its tokenizer; a missing file counts as empty."""
    contents = {}
    for name in ("config.json", _SETTINGS_FILE, _TOKENIZER_FILE, "special_tokens_map.json", "added_tokens.json"):
        file = path / name
        contents[name] = read_json_object(file, _AGAIN) if file.exists() else {}
    settings = contents[_SETTINGS_FILE]
    tokenizer = contents[_TOKENIZER_FILE]
    if (path / _TOKENIZER_FILE).exists() and not isinstance(tokenizer.get("model"), dict):
        raise _damaged(path / _TOKENIZER_FILE, "it has no model")
    if "added_tokens_decoder" not in settings:
        settings |= contents["special_tokens_map.json"]
    return _Folder(path, contents["config.json"], settings, tokenizer, contents["added_tokens.json"])


def _is_general(folder: _Folder) -> bool:
    """Return whether transformers uses tokenizer.json as it is, instead of building BERT's tokenizer.

    Raises UserError for a class of tokenizers whose rules are not known, or if the file is needed and missing.
    """
    is_modern = folder.model.get("model_type") == MODERNBERT.model_type
    name = folder.settings.get("tokenizer_class") or folder.model.get("tokenizer_class")
    if not isinstance(name, str | None):
        raise _damaged(folder.file(_SETTINGS_FILE), "tokenizer_class is no name")
    name = name and name.removesuffix("Fast")
    is_bert = name in _BERT_CLASSES and not (is_modern and folder.tokenizer)
    if not is_bert and not is_modern and name not in _GENERAL_CLASSES:
        raise UserError(
            f"{folder.file(_SETTINGS_FILE)}: tokenizer_class {name} has rules of its own, which are not known here; "
            f"save its `backend_tokenizer` as tokenizer.json, and set tokenizer_class to PreTrainedTokenizerFast"
        )
    if not is_bert and not folder.tokenizer:
        raise UserError(
            f"{folder.file(_TOKENIZER_FILE)}: is missing, but tokenizer_class {name} needs it; copy the model's own "
            f"file"
        )
    return not is_bert


def _general_tokenizer(folder: _Folder) -> tokenizers.Tokenizer:
    file = folder.file(_TOKENIZER_FILE)
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(folder.tokenizer))
    except Exception as error:  # noqa: BLE001  (the library raises plain Exceptions)
        raise _damaged(file, f"it cannot be loaded ({error})") from None


def _bert_tokenizer(folder: _Folder) -> tokenizers.Tokenizer:
    """Build BERT's tokenizer from the tokens of tokenizer.json or vocab.txt and the rules of tokenizer_config.json."""
    settings = folder.settings
    normalizer = _bert_normalizer(folder)
    ids = _bert_ids(folder)
    unknown = _content(settings.get("unk_token")) or "[UNK]"
    if unknown not in ids:
        file = folder.file(_TOKENIZER_FILE if folder.tokenizer else VOCAB_FILE)
        raise UserError(f"{file}: not a WordPiece vocabulary, because it has no token {unknown}; {_AGAIN}")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(ids, unk_token=unknown))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    cls, sep = (_content(settings.get(key)) or _ROLES[key] for key in ("cls_token", "sep_token"))
    if cls in ids and sep in ids:
        tokenizer.post_processor = rows_of_bert(cls, sep, ids)
    return tokenizer


def _bert_normalizer(folder: _Folder) -> tokenizers.normalizers.Normalizer:
    rules: dict[str, Any] = {"do_lower_case": True, "tokenize_chinese_chars": True, "strip_accents": None}
    for key, default in rules.items():
        rules[key] = folder.settings.get(key, default)
        if not isinstance(rules[key], bool) and rules[key] is not default:
            raise _damaged(folder.file(_SETTINGS_FILE), f"{key} is neither true nor false")
    return tokenizers.normalizers.BertNormalizer(
        lowercase=rules["do_lower_case"],
        handle_chinese_chars=rules["tokenize_chinese_chars"],
        strip_accents=rules["strip_accents"],
    )


def _bert_ids(folder: _Folder) -> dict[str, int]:
    """Return token -> id for BERT's tokenizer, from tokenizer.json or, if that is missing, from vocab.txt."""
    if not folder.tokenizer:
        return _ids_of_lines(folder.file(VOCAB_FILE))
    file = folder.file(_TOKENIZER_FILE)
    ids = folder.tokenizer["model"].get("vocab")
    is_word_piece = "merges" not in folder.tokenizer["model"] and isinstance(ids, dict)
    if not is_word_piece or not all(type(token_id) is int and token_id >= 0 for token_id in ids.values()):
        raise UserError(
            f"{file}: not the tokenizer of an ELECTRA model, because it has no model.vocab of WordPiece; set "
            f"tokenizer_class in {_SETTINGS_FILE} to PreTrainedTokenizerFast to use it as it is, or {_AGAIN}"
        )
    return ids


def _ids_of_lines(vocab_file: Path) -> dict[str, int]:
    with readable(vocab_file):
        starts_with_mark = read_regular(vocab_file).startswith(BYTE_ORDER_MARK.encode())
    if starts_with_mark:
        raise UserError(
            f"{vocab_file}: begins with a byte order mark, which transformers reads as part of the first token; "
            f"save it as UTF-8 without one"
        )
    return Vocabulary.read(vocab_file).ids


def _check_same_tokens(folder: _Folder, ids: dict[str, int]) -> None:
    """Raise UserError if the folder has a vocab.txt with other tokens or ids than tokenizer.json (`ids`)."""
    vocab_file = folder.file(VOCAB_FILE)
    if vocab_file.exists() and _without_blank(Vocabulary.read(vocab_file).ids) != _without_blank(ids):
        raise UserError(
            f"{vocab_file}: its tokens are not those of {folder.file(_TOKENIZER_FILE)}, so one of the two is not the "
            f"model's; {_AGAIN}"
        )


def _without_blank(ids: dict[str, int]) -> dict[str, int]:
    """Return token -> id without the empty token "", which no text contains."""
    return {token: token_id for token, token_id in ids.items() if token}


def _add_tokens(tokenizer: tokenizers.Tokenizer, folder: _Folder) -> None:
    """Add the tokens that the folder's settings name beside its vocabulary, in the order of transformers.

    The order decides the ids of tokens that the vocabulary does not have.
    """
    named, unnamed = _special_tokens(folder.settings)
    special = [*named, *unnamed]
    tokens = [token for _, token in sorted(_declared_tokens(folder, special).items())]
    known = {token.content for token in (*tokenizer.get_added_tokens_decoder().values(), *tokens)}
    tokens += [_added_token(value, True) for value in special if _content(value) not in known]
    named_texts = {_content(value) for value in named}
    for token in tokens:
        token.special = token.special or token.content in named_texts
    tokenizer.add_tokens(tokens)


def _special_tokens(settings: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the special tokens with a name, such as "cls_token", and those without one, in transformers' order.

    For a class of BERT's, its own tokens have the names that the settings do not give.
    """
    names = (*_ROLES, *_OTHER_NAMES)
    named = {key: settings[key] for key in settings if key in names or _is_token(key, settings[key])}
    if (settings.get("tokenizer_class") or "BertTokenizer").removesuffix("Fast") in _BERT_CLASSES:
        named = _ROLES | named
    named = {key: value for key, value in named.items() if value is not None}
    given = settings.get("extra_special_tokens")
    older = settings.get("additional_special_tokens") or []  # the name of the key in older files
    unnamed = given or older
    if isinstance(unnamed, dict):
        named |= unnamed
        unnamed = older if given else []
    if not isinstance(unnamed, list):
        raise TypeError("extra_special_tokens is no list")
    return list(named.values()), unnamed


def _is_token(key: str, value: object) -> bool:
    """Return whether an entry of the settings names an extra token of this model, such as "entity_token"."""
    return key.endswith("_token") and isinstance(value, str | dict)


def _declared_tokens(folder: _Folder, special: Iterable[Any]) -> dict[int, tokenizers.AddedToken]:
    """Return the tokens that the folder's files add to its vocabulary, id -> token.

    Tokens of added_tokens.json, which have no flags there, are special tokens if they are in `special`.
    """
    if "added_tokens_decoder" in folder.settings:
        declared = folder.settings["added_tokens_decoder"]
        return {int(token_id): _added_token(value, False) for token_id, value in declared.items()}
    special_names = {_content(value) for value in special}
    tokens = {}
    for content, token_id in folder.added_tokens.items():
        is_special = content in special_names
        tokens[int(token_id)] = tokenizers.AddedToken(content, normalized=not is_special, special=is_special)
    for value in folder.tokenizer.get("added_tokens") or ():
        tokens[int(value["id"])] = _added_token(value, False)
    return tokens


def _added_token(value: Any, special: bool) -> tokenizers.AddedToken:
    if isinstance(value, str):
        return tokenizers.AddedToken(value, special=special)
    flags = {key: value[key] for key in _TOKEN_FLAGS if key in value}
    return tokenizers.AddedToken(value["content"], **{"special": special, **flags})


def _content(value: Any) -> str | None:
    """Return the text of a token from a tokenizer's JSON file, where a token is a string or an object with flags."""
    return value.get("content") if isinstance(value, dict) else value


def _check_ids(folder: _Folder, source: Path, tokenizer: tokenizers.Tokenizer) -> None:
    """Raise UserError, which names the file `source`, if a token's id has no row in the model's embeddings."""
    ids = _without_blank(tokenizer.get_vocab(with_added_tokens=True))
    num_rows = folder.model.get("vocab_size")
    outside = [token for token, token_id in ids.items() if not isinstance(num_rows, int) or token_id >= num_rows]
    if outside:
        raise UserError(
            f"{source}: the ids of its {len(ids)} tokens are not 0 to {(num_rows or 0) - 1}, the rows of the model's "
            f"embeddings (`{min(outside)}` is outside); {_AGAIN}"
        )


def _lines_of_bert(content: dict[str, Any]) -> str | None:
    """Convert a parsed tokenizer.json to the text of a vocab.txt; None if it is not exactly BERT's tokenizer."""
    if not _is_exactly_bert(content):
        return None
    tokens = _without_blank(content["model"]["vocab"])
    lines = [""] * (max(tokens.values()) + 1)
    for token, token_id in tokens.items():
        lines[token_id] = token
    text = "\n".join(lines)
    # A token that contains a line end, or ends in white space, has no line of its own.
    return text if _without_blank(Vocabulary(text, "vocab.txt").ids) == tokens else None


def _is_exactly_bert(content: dict[str, Any]) -> bool:
    """Return whether a parsed tokenizer.json is a WordPiece tokenizer that has all rules of BERT and no others."""
    model = content["model"]
    ids: dict[str, int] = model["vocab"] if model["type"] == "WordPiece" else {}
    normalizer = content["normalizer"] or {}
    rules = {key: value for key, value in normalizer.items() if key != "lowercase"}
    strips_accents = rules.pop("strip_accents", None)
    added = {token["content"]: token["id"] for token in content["added_tokens"] if token["special"]}
    return (
        model["type"] == "WordPiece"
        and (model["unk_token"], model["continuing_subword_prefix"]) == ("[UNK]", "##")
        and model["max_input_chars_per_word"] == MAX_WORD_CHARS
        and rules == {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
        and strips_accents in (None, normalizer["lowercase"])
        and content["pre_tokenizer"] == {"type": "BertPreTokenizer"}
        and len(added) == len(content["added_tokens"])
        and added == {token: ids.get(token) for token in SPECIAL_TOKENS}
        and ends_of_rows(content["post_processor"], with_types=True) == ("[CLS]", "[SEP]")
    )


def _check_roles(folder: _Folder, vocabulary: Vocabulary) -> None:
    """Raise UserError if tokenizer_config.json has another special token (such as `mask_token`) than `vocabulary`."""
    for key, role in _ROLES.items():
        name = _content(folder.settings.get(key))
        found = vocabulary.tokens[vocabulary.special[role]]
        if name is not None and name != found:
            raise UserError(
                f"{folder.file(_SETTINGS_FILE)}: {key} is {name}, but the token with this role in the vocabulary is "
                f"{found}; correct the name, or give a tokenizer with one such token"
            )


def _check_ends(folder: _Folder, vocabulary: Vocabulary, content: dict[str, Any]) -> None:
    """Raise UserError if the tokenizer does not form rows `[CLS] A [SEP]` and `[CLS] A [SEP] B [SEP]`."""
    is_modern = folder.model.get("model_type") == MODERNBERT.model_type  # it has no token types
    is_ours = folder.file(PRETRAINING_FILE).exists()  # older exports of byte-level BPE give all tokens type 0
    expected = tuple(vocabulary.tokens[vocabulary.special[role]] for role in ("[CLS]", "[SEP]"))
    if ends_of_rows(content["post_processor"], with_types=not is_modern and not is_ours) != expected:
        cls, sep = expected
        raise UserError(
            f"{folder.file(_TOKENIZER_FILE)}: its post_processor does not make rows `{cls} A {sep}` and `{cls} A "
            f"{sep} B {sep}`, the only ones that are known here; give it the post_processor of BERT, if the model was "
            f"trained on such rows"
        )


def _check_added_tokens_are_found(folder: _Folder, vocabulary: Vocabulary, content: dict[str, Any]) -> None:
    """Raise UserError if transformers splits the name of an extra special token in a text, which is not done here."""
    special = [token for token in content["added_tokens"] if token["special"]]
    names = [token["content"] for token in special if token["id"] not in vocabulary.special.values()]
    if names and folder.settings.get("split_special_tokens"):
        raise UserError(
            f"{folder.file(_SETTINGS_FILE)}: with split_special_tokens, {', '.join(names)} in a text would not be "
            f"found as special tokens, which is not supported here; remove split_special_tokens, or those tokens"
        )


def _damaged(file: Path, reason: str) -> UserError:
    return UserError(f"{file}: damaged, because {reason}; {_AGAIN}")
