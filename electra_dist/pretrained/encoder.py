"""A pretrained encoder with its vocabulary: from a run, from a Hugging Face folder, or at random.

Guarantee: whatever the source, `Pretrained` holds fp32 weights under the same names (`embeddings.`, `encoder.`, and
`head.` where there is one), and `backbone` builds a module with a copy of them, so that seeds do not see each other.
`digest` is of every weight: results are kept under it.

Cost: the weights once in host memory (1.3 GB for Large), and 1 s to digest them.

Where it stops: Hugging Face folders of type `electra` with absolute positions; local folders only, nothing is fetched.

Shapes: B rows, S tokens, H hidden width.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import nn

from electra_dist.config import ModelConfig, ObjectiveConfig, TowerConfig
from electra_dist.config_file import load_config
from electra_dist.errors import UserError
from electra_dist.model.encoder import Encoder, Noise, SharedEmbeddings
from electra_dist.model.init import build_towers
from electra_dist.model.rows import SpecialIds, attention_bias, derive
from electra_dist.pretrained.hf import State, from_hf_discriminator, from_hf_generator, standalone
from electra_dist.pretrained.hf_load import read_weights
from electra_dist.pretrained.run_weights import load_run_weights
from electra_dist.run.folder import is_run_folder
from electra_dist.tokenizer import VOCAB_FILE, Vocabulary, WordPieceTokenizer

TowerName = Literal["discriminator", "generator"]
_RANDOM = "random:"


class Backbone(nn.Module):
    """Embeddings and encoder as one module: ids to states. One example a row: `[CLS] A [SEP]`, maybe `B [SEP]`."""

    def __init__(self, model: ModelConfig, tower: TowerConfig, special: SpecialIds) -> None:
        super().__init__()
        self.special = special
        self.embeddings = SharedEmbeddings(model)
        self.encoder = Encoder(model, tower)

    def forward(self, ids_BS: torch.Tensor, noise: Noise | None = None) -> torch.Tensor:
        """[B, S, H] states of `ids_BS` (int64); `noise` keys the dropout and may lack in evaluation."""
        layout = derive(ids_BS, self.special)
        embedded = self.embeddings(ids_BS, layout.position_BS, layout.token_type_BS)
        bias = attention_bias(layout, embedded.dtype)
        return self.encoder(embedded, bias, noise or Noise.off(ids_BS))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretrained:
    """Weights, their shape and their vocabulary."""

    name: str  # for people
    model: ModelConfig
    tower: TowerConfig  # the one whose weights these are
    state: dict[str, torch.Tensor]  # fp32, on the host
    tokenizer: WordPieceTokenizer
    vocabulary: Vocabulary
    reads_masks: bool = True  # whether a tower that predicts tokens was trained on [MASK], or on replaced tokens

    @classmethod
    def from_state(
        cls,
        name: str,
        state: State,
        model: ModelConfig,
        vocabulary: Vocabulary,
        lowercase: bool,
        tower: TowerName = "discriminator",
        reads_masks: bool = True,
    ) -> Pretrained:
        """One tower out of a state with the names of ElectraTowers (or of an objective around them)."""
        if vocabulary.size != model.vocab_size:
            raise UserError(
                f"{name}: the vocabulary has {vocabulary.size} entries, the model {model.vocab_size}; "
                f"give the model's own vocab.txt"
            )
        kept = _tower_state(state, model, tower)
        width = kept["embeddings.word.weight"].shape[1]  # a generator may have tables of its own width
        return cls(
            name=name,
            model=model.model_copy(update={"embedding_size": width}),
            tower=model.discriminator if tower == "discriminator" else model.generator,
            state=kept,
            tokenizer=WordPieceTokenizer(vocabulary, lowercase),
            vocabulary=vocabulary,
            reads_masks=reads_masks,
        )

    @property
    def special(self) -> SpecialIds:
        """Ids of the special tokens."""
        return SpecialIds.from_tokens(self.vocabulary.special)

    @cached_property
    def digest(self) -> str:
        """sha256 of the vocabulary and every weight."""
        digest = hashlib.sha256(self.vocabulary.sha256.encode())
        for key in sorted(self.state):
            digest.update(key.encode())
            digest.update(self.state[key].contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def backbone(self, hidden_dropout: float = 0.0, attention_dropout: float = 0.0) -> Backbone:
        """A new module with these weights."""
        dropout = {"hidden_dropout": hidden_dropout, "attention_dropout": attention_dropout}
        with torch.device("meta"):  # torch's own initialisation would take as long as all the rest
            module = Backbone(self.model.model_copy(update=dropout), self.tower, self.special)
        module.to_empty(device="cpu")
        module.load_state_dict({key: value for key, value in self.state.items() if not key.startswith("head.")})
        return module

    def head_state(self) -> dict[str, torch.Tensor]:
        """The pretraining head's weights; empty where the source has none."""
        return {key.removeprefix("head."): value for key, value in self.state.items() if key.startswith("head.")}


def load_pretrained(
    spec: str, tower: TowerName = "discriminator", vocab: Path | None = None, step: int | None = None
) -> Pretrained:
    """The model that `spec` names: a run's folder, a Hugging Face folder, or `random:CONFIG.yaml`.

    Args:
        spec: as given to --model.
        tower: of a run or of `random:`; a Hugging Face folder holds one only.
        vocab: vocab.txt for `random:`; default: that of the config's corpus.
        step: which checkpoint of a run; default: the newest.

    Raises:
        UserError: there is nothing such, or a part of it is missing.
    """
    if spec.startswith(_RANDOM):
        return _random(Path(spec.removeprefix(_RANDOM)), tower, vocab)
    folder = Path(spec)
    if is_run_folder(folder):
        return _from_run(folder, tower, step)
    if (folder / "config.json").exists():
        return _from_hugging_face(folder)
    raise UserError(
        f"{spec}: no model: neither a run (config.yaml) nor a Hugging Face folder (config.json); "
        f"name one, or random:CONFIG.yaml"
    )


def device_of_choice() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _tower_state(state: State, model: ModelConfig, tower: TowerName) -> dict[str, torch.Tensor]:
    """The weights of one tower under our names; the head is the one that it was trained with."""
    ours = standalone(state, model, tower)

    def part(name: str) -> dict[str, torch.Tensor]:
        return {key.removeprefix(f"{name}."): v for key, v in ours.items() if key.startswith(f"{name}.")}

    if tower == "discriminator":
        gate = {f"copy_gate.{key}": weight for key, weight in part("copy_gate").items()}
        encoder, head = part("discriminator"), part("discriminator_head") or part("token_head") | gate
    else:
        encoder, head = part("generator"), part("generator_head")
        if not head or part("generator_reverse"):
            raise UserError("--tower generator: this model has no bidirectional generator; leave --tower out")
    parts = {"embeddings": part("embeddings"), "encoder": encoder, "head": head}
    return {f"{name}.{key}": weight for name, weights in parts.items() for key, weight in weights.items()}


def _random(file: Path, tower: TowerName, vocab: Path | None) -> Pretrained:
    config = load_config(file)
    path = vocab or Path(config.data.corpus) / VOCAB_FILE
    if not path.exists():
        raise UserError(f"{path}: no such vocabulary; give the vocab.txt of {file} by --vocab")
    weights = build_towers(config.model, config.seed, config.objective).state_dict()
    vocabulary = Vocabulary.read(path)
    lowercase, reads_masks = config.corpus.lowercase, _reads_masks(config.objective, tower)
    return Pretrained.from_state(f"{_RANDOM}{file}", weights, config.model, vocabulary, lowercase, tower, reads_masks)


def _reads_masks(objective: ObjectiveConfig, tower: TowerName) -> bool:
    return tower == "generator" or objective.name == "mlm"


def _from_run(run: Path, tower: TowerName, step: int | None) -> Pretrained:
    found = load_run_weights(run, step)
    for line in found.damaged:
        print(line, file=sys.stderr)
    return Pretrained.from_state(
        f"{run} at step {found.state.step:,}",
        found.weights,
        found.config.model,
        Vocabulary.read(found.vocab_file),
        found.tokenizer.lowercase,
        tower,
        _reads_masks(found.config.objective, tower),
    )


def _from_hugging_face(folder: Path) -> Pretrained:
    tree = json.loads((folder / "config.json").read_text())
    model = _model_config(folder, tree)
    weights = read_weights(folder)
    tower: TowerName = "generator" if "generator_predictions.dense.weight" in weights else "discriminator"
    try:
        state = (from_hf_generator if tower == "generator" else from_hf_discriminator)(weights, model)
    except KeyError as error:
        raise UserError(f"{folder}: the weights lack {error}; it is no whole ELECTRA model") from None
    vocabulary, lowercase = _hugging_face_vocabulary(folder)
    return Pretrained.from_state(str(folder), state, model, vocabulary, lowercase, tower)


def _model_config(folder: Path, tree: dict[str, Any]) -> ModelConfig:
    if tree.get("model_type") != "electra" or tree.get("position_embedding_type", "absolute") != "absolute":
        raise UserError(f"{folder}/config.json: not an ELECTRA model with absolute positions; nothing else is read")
    try:
        tower = {
            "hidden_size": tree["hidden_size"],
            "num_layers": tree["num_hidden_layers"],
            "num_heads": tree["num_attention_heads"],
            "intermediate_size": tree["intermediate_size"],
        }
        return ModelConfig.model_validate(
            {
                "vocab_size": tree["vocab_size"],
                "embedding_size": tree["embedding_size"],
                "max_positions": tree["max_position_embeddings"],
                "type_vocab_size": tree.get("type_vocab_size", 2),
                "layer_norm_eps": tree.get("layer_norm_eps", 1e-12),
                "discriminator": tower,
                "generator": tower,
            }
        )
    except (KeyError, ValidationError) as error:
        raise UserError(f"{folder}/config.json: no shape of an ELECTRA model: {error}".replace("\n", " ")) from None


def _hugging_face_vocabulary(folder: Path) -> tuple[Vocabulary, bool]:
    """The vocabulary, and whether text is lower-cased; tokenizer.json is the one that Hugging Face itself follows."""
    whole, plain, settings = folder / "tokenizer.json", folder / VOCAB_FILE, folder / "tokenizer_config.json"
    if whole.exists():
        tree = json.loads(whole.read_text("utf-8"))
        ids: dict[str, int] = tree["model"]["vocab"]
        return Vocabulary("\n".join(sorted(ids, key=ids.__getitem__)), str(whole)), tree["normalizer"]["lowercase"]
    if not plain.exists():
        raise UserError(f"{folder}: neither tokenizer.json nor vocab.txt; copy the model's vocabulary there")
    known = json.loads(settings.read_text()) if settings.exists() else {}
    return Vocabulary.read(plain), known.get("do_lower_case", True)
