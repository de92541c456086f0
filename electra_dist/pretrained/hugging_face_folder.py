"""Read the shape and the vocabulary of a model in a local folder of Hugging Face's format.

Limits: models of type `electra` with absolute positions, and of type `modernbert`. Nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from electra_dist.config import ModelConfig
from electra_dist.errors import UserError
from electra_dist.pretrained import hf_modernbert
from electra_dist.pretrained.pretraining_record import check_tokenizer_files
from electra_dist.store.json_file import DamagedJson, read_json_object, validate_json
from electra_dist.tokenizer import VOCAB_FILE, Vocabulary

_LARGEST_SIZE = 1 << 24  # in a config.json; no vocabulary and no layer has as many entries
_AGAIN = "download or export the model again"  # next step in messages about a damaged file


def read_hugging_face_model_config(folder: Path) -> ModelConfig:
    """Return the section `model` of this project's config for a Hugging Face model of the given shape.

    The folder holds one tower, whereas the section describes two: generator and discriminator get the same shape.

    Args:
        folder: the model's folder, whose config.json is read.

    Raises:
        UserError: it is neither an ELECTRA model with absolute positions nor a ModernBERT, or its shape is incomplete
            or impossible.
    """
    settings = read_json_object(folder / "config.json", _AGAIN)
    model_type = settings.get("model_type")
    positions = settings.get("position_embedding_type", "absolute")
    is_electra = model_type == "electra" and positions == "absolute"
    is_modern = model_type == hf_modernbert.MODEL_TYPE
    if not is_electra and not is_modern:
        raise UserError(
            f"{folder}/config.json: neither an ELECTRA model with absolute positions nor a ModernBERT (model_type "
            f"{model_type}, position_embedding_type {positions}); name the folder of another model"
        )
    sizes = [value for value in settings.values() if isinstance(value, int)]
    if max(sizes, default=0) > _LARGEST_SIZE:
        raise UserError(f"{folder}/config.json: the size {max(sizes)} is impossible; {_AGAIN}")
    try:
        if is_modern:
            fields = hf_modernbert.model_section(str(folder / "config.json"), settings)
        else:
            fields = _electra_section(settings)
        return ModelConfig.model_validate(fields)
    except (KeyError, ValidationError) as error:
        reason = str(error).replace("\n", " ")
        raise UserError(
            f"{folder}/config.json: the shape of the model is incomplete or impossible: {reason}; "
            f"copy the model's own config.json there"
        ) from None


def _electra_section(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the config.json of an ELECTRA model to the fields of the config section `model` of this project.

    A config.json describes one encoder, so both towers of the result get its shape.

    Args:
        settings: content of config.json.

    Returns:
        Name of the field -> value, as `ModelConfig.model_validate` expects it.

    Raises:
        KeyError: config.json lacks a size of the model.
    """
    tower = {
        "hidden_size": settings["hidden_size"],
        "num_layers": settings["num_hidden_layers"],
        "num_heads": settings["num_attention_heads"],
        "intermediate_size": settings["intermediate_size"],
    }
    return {
        "vocab_size": settings["vocab_size"],
        "embedding_size": settings["embedding_size"],
        "max_positions": settings["max_position_embeddings"],
        "type_vocab_size": settings.get("type_vocab_size", 2),
        "layer_norm_eps": settings.get("layer_norm_eps", 1e-12),
        "discriminator": tower,
        "generator": tower,
    }


@dataclasses.dataclass(frozen=True)
class _TokenizerModel:
    """Entry "model" of Hugging Face's tokenizer.json."""

    vocab: dict[str, int]  # token -> id


@dataclasses.dataclass(frozen=True)
class _Normalizer:
    """Entry "normalizer" of Hugging Face's tokenizer.json."""

    lowercase: bool


@dataclasses.dataclass(frozen=True)
class _TokenizerJson:
    """Part of Hugging Face's tokenizer.json from which a vocabulary is read."""

    model: _TokenizerModel
    normalizer: _Normalizer


_TOKENIZER_JSON = TypeAdapter(_TokenizerJson)


def read_hugging_face_vocabulary(folder: Path) -> tuple[Vocabulary, bool]:
    """Return the vocabulary of a Hugging Face folder, and whether its tokenizer lower-cases text.

    tokenizer.json is preferred, because Hugging Face's own tokenizer follows it. Otherwise vocab.txt is read, and
    tokenizer_config.json for lower-casing, whose default is True. If tokenizer.json has merges (BPE), the file itself
    is the vocabulary, and the result for lower-casing is False, because the file decides about that.

    The files of an export are verified against the digests in its pretraining.json. A model of another program names
    none; then the ids in tokenizer.json must be 0, 1, 2, ..., and vocab.txt, if there is one, must have the same
    tokens.

    Raises:
        ManifestMismatch: a file of an export has another digest.
        UserError: the folder has no vocabulary, or a file of the tokenizer is damaged.
    """
    check_tokenizer_files(folder)
    tokenizer_file = folder / "tokenizer.json"
    vocab_file = folder / VOCAB_FILE
    settings_file = folder / "tokenizer_config.json"
    if tokenizer_file.exists():
        tokenizer = read_json_object(tokenizer_file, _AGAIN)
        model = tokenizer.get("model")
        if isinstance(model, dict) and "merges" in model:  # byte-level BPE, such as ModernBERT's
            return Vocabulary.read(tokenizer_file), False
        try:
            parts = validate_json(_TOKENIZER_JSON, tokenizer)
        except DamagedJson:
            raise UserError(
                f"{tokenizer_file}: not the tokenizer of an ELECTRA model, because it has no model.vocab or no "
                f"normalizer.lowercase; {_AGAIN}"
            ) from None
        ids = parts.model.vocab
        tokens_by_id = sorted(ids, key=lambda token: ids[token])
        vocabulary = Vocabulary("\n".join(tokens_by_id), str(tokenizer_file))
        _check_same_tokens(vocabulary, ids, tokenizer_file, vocab_file)
        return vocabulary, parts.normalizer.lowercase
    if not vocab_file.exists():
        raise UserError(
            f"{folder}: holds neither tokenizer.json nor {VOCAB_FILE}; copy the model's own tokenizer files there"
        )
    settings = read_json_object(settings_file, _AGAIN) if settings_file.exists() else {}
    lowercase = settings.get("do_lower_case", True)
    if not isinstance(lowercase, bool):
        raise UserError(f"{settings_file}: damaged, because do_lower_case is neither true nor false; {_AGAIN}")
    return Vocabulary.read(vocab_file), lowercase


def _check_same_tokens(vocabulary: Vocabulary, ids: dict[str, int], tokenizer_file: Path, vocab_file: Path) -> None:
    """Raise UserError if tokenizer.json skips ids, or if the vocab.txt beside it has other tokens.

    Args:
        vocabulary: tokens of tokenizer.json in the order of their ids.
        ids: their ids.
        tokenizer_file: path of tokenizer.json.
        vocab_file: path of vocab.txt, which may be missing.
    """
    if vocabulary.ids != ids:
        raise UserError(
            f"{tokenizer_file}: the ids of its {vocabulary.size} tokens are not 0 to {vocabulary.size - 1}; {_AGAIN}"
        )
    if vocab_file.exists() and Vocabulary.read(vocab_file).tokens != vocabulary.tokens:
        raise UserError(
            f"{vocab_file}: its tokens are not those of {tokenizer_file}, so one of the two is not the model's; "
            f"{_AGAIN}"
        )
