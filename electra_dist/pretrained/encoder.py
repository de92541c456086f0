"""Load a pretrained tower with its vocabulary from a run or a Hugging Face folder, or make one with random weights.

Guarantee: whatever the source, `Pretrained` holds fp32 weights under the same names (`embeddings.`, `encoder.`, and
`head.` if there is one). `Pretrained.backbone` builds a module with a copy of them, so that fine-tuning one copy does
not change the next.

Cost: the weights once in host memory (1.3 GB for Large), and 1 s to digest them.

A name on the Hugging Face Hub stands for its folder in the Hub's cache; see electra_dist/hub.py.

Shapes: B rows, S tokens, H hidden width.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import sys
from functools import cached_property
from numbers import Real
from pathlib import Path

import torch
from electra_kernels.operation_types import SpecialIds
from torch import nn

from electra_dist.config import Config, ModelConfig, TowerConfig
from electra_dist.config.load import load_config
from electra_dist.data.manifest import MANIFEST_KEY, read_corpus_vocabulary, read_manifest
from electra_dist.errors import UserError
from electra_dist.escapes import printable
from electra_dist.hub import shown_name
from electra_dist.model.attention import derive, new_attention_mask
from electra_dist.model.encoder import DropoutKeys
from electra_dist.model.towers import PARTS, WithoutInitialValues, build_towers
from electra_dist.pretrained.hf import State, TowerName, family_of, standalone, submodules
from electra_dist.pretrained.hf_folders import (
    convert_weights,
    read_hugging_face_model_config,
    read_pretraining_record,
    read_weights,
)
from electra_dist.pretrained.hf_settings import is_of_a_task
from electra_dist.pretrained.hugging_face_tokenizer import read_hugging_face_vocabulary
from electra_dist.pretrained.locate import RANDOM, Step, locate_model
from electra_dist.pretrained.weights import load_run_weights
from electra_dist.run.environment_record import check_gpus
from electra_dist.run.folder import is_run_folder
from electra_dist.store.json_file import read_json_object
from electra_dist.store.open_store import open_store
from electra_dist.tokenizer import VOCAB_FILE, TextTokenizer, Vocabulary, new_tokenizer

# Beginning of the names of a layer's weights in Hugging Face's ELECTRA and ModernBERT, with the number of the layer.
_LAYER = re.compile(r"(?:electra\.encoder\.layer|model\.layers)\.(\d+)\.")


class Backbone(nn.Module):
    """Embeddings and encoder of one tower (generator or discriminator): token ids in, states of the last layer out.

    Each row of its input holds one example, `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`, then [PAD] up to its end.
    """

    def __init__(self, model: ModelConfig, tower: TowerConfig, special: SpecialIds) -> None:
        """Create the module with torch's own initialisation; `Pretrained.backbone` loads weights into it."""
        super().__init__()
        self.model = model
        self.special = special
        parts = PARTS[model.architecture]
        self.embeddings = parts.embeddings(model, model.embedding_size)
        self.encoder = parts.encoder(model, tower, model.embedding_size)

    def forward(self, ids_BS: torch.Tensor, dropout_keys: DropoutKeys | None = None) -> torch.Tensor:
        """Return the states of the last layer, [B, S, H]. Dropout is drawn by `dropout_keys`; None: no dropout."""
        if dropout_keys is None:
            dropout_keys = DropoutKeys.off(ids_BS)
        layout = derive(ids_BS, self.special)
        embedded = self.embeddings(ids_BS, layout, dropout_keys)
        mask = new_attention_mask(self.model, layout, embedded.dtype)
        return self.encoder(embedded, mask, dropout_keys)

    def layer_states(self, ids_BS: torch.Tensor) -> list[torch.Tensor]:
        """Return the input of the first layer and the output of each of the L layers: L + 1 tensors [B, S, H].

        The last one is what `forward` returns; with the architecture `modern` it is after the final LayerNorm. Call
        this in evaluation mode only.
        """
        states: list[torch.Tensor] = []  # [B * S, H]: the layers work on flattened rows

        def keep_input(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            states.append(inputs[0])

        def keep_output(_: nn.Module, __: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            states.append(output)

        hooks = [self.encoder.layers[0].register_forward_pre_hook(keep_input)]
        hooks += [layer.register_forward_hook(keep_output) for layer in self.encoder.layers]
        try:
            final_BSH = self(ids_BS)
        finally:
            for hook in hooks:
                hook.remove()
        states_BSH = [state_TH.unflatten(0, ids_BS.shape) for state_TH in states]
        return [*states_BSH[:-1], final_BSH]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretrained:
    """Weights of one pretrained tower (generator or discriminator), with their shape, vocabulary and tokenizer."""

    name: str  # for messages and tables, such as "runs/small at step 1,000"
    model: ModelConfig  # config of the model; its embedding_size is that of this tower's tables
    tower: TowerConfig  # shape of this tower
    state: dict[str, torch.Tensor]  # fp32 on the host, under `embeddings.`, `encoder.` and `head.`
    tokenizer: TextTokenizer
    vocabulary: Vocabulary
    reads_masks: bool = True  # if the tower predicts tokens: trained on text with [MASK], not with replaced tokens
    gives_energies: bool = False  # if it is a discriminator: its outputs are energies (Electric), not logits
    trained_length: int | None = None  # tokens of a row in training; None if it is not known

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
        gives_energies: bool = False,
        trained_length: int | None = None,
        may_have_unused_rows: bool = False,
    ) -> Pretrained:
        """Take one tower, with the embeddings that it reads and its head, out of a state dict with both towers.

        `state` holds whole (not partitioned) parameters, with or without the objective's prefix `towers.`. `model` is
        the section `model` of the training config. With `may_have_unused_rows` the embeddings may have more rows than
        the vocabulary has tokens, as in models of other programs. The other arguments are fields of the result. Raises
        UserError if the vocabulary has another size, or if the model has no such tower.
        """
        num_unused = model.vocab_size - vocabulary.size
        if num_unused < 0 or (num_unused and not may_have_unused_rows):
            raise UserError(
                f"{name}: the vocabulary has {vocabulary.size} entries, but the model has {model.vocab_size}; use the "
                f"vocab.txt that the model was trained with"
            )
        tower_state = _tower_state(state, model, tower)
        embedding_size = tower_state["embeddings.word.weight"].shape[1]  # the generator's tables may be narrower
        return cls(
            name=name,
            model=model.model_copy(update={"embedding_size": embedding_size}),
            tower=model.discriminator if tower == "discriminator" else model.generator,
            state=tower_state,
            tokenizer=new_tokenizer(vocabulary, lowercase),
            vocabulary=vocabulary,
            reads_masks=reads_masks,
            gives_energies=gives_energies,
            trained_length=trained_length,
        )

    def __repr__(self) -> str:
        """Return one line, without the weights."""
        num_parameters = sum(weight.numel() for weight in self.state.values())
        return (
            f"Pretrained({self.name!r}: {self.tower.num_layers} layers of {self.tower.hidden_size}, "
            f"{self.vocabulary.size:,} tokens, {num_parameters:,} parameters)"
        )

    @property
    def special(self) -> SpecialIds:
        """Return the ids of the special tokens ([CLS], [SEP], [MASK], [PAD], [UNK]) in the vocabulary."""
        return SpecialIds.from_tokens(self.vocabulary.special)

    @cached_property
    def digest(self) -> str:
        """Return a SHA-256 in hexadecimal over the vocabulary, its casing, and the names and bytes of all weights.

        Fine-tuning stores its results under this digest, so that they belong to these weights alone.
        """
        digest = hashlib.sha256(self.vocabulary.sha256.encode())
        # A tokenizer.json says itself what becomes of capitals; a vocab.txt does not.
        if self.vocabulary.tokenizer_json is None and not self.tokenizer.lowercase:
            digest.update(b"cased")
        for key in sorted(self.state):
            digest.update(key.encode())
            digest.update(self.state[key].contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def backbone(self, hidden_dropout: float = 0.0, attention_dropout: float = 0.0) -> Backbone:
        """Return a new module with a copy of these weights, on the host and in training mode.

        The arguments are probabilities of dropout: `hidden_dropout` is for embeddings and the outputs of sub-layers.
        Raises UserError if one is not in [0, 1), or if a weight that the config needs is missing or has another shape.
        """
        dropout = {"hidden_dropout": hidden_dropout, "attention_dropout": attention_dropout}
        for name, rate in dropout.items():
            if not isinstance(rate, Real) or not 0 <= rate < 1:
                raise UserError(f"backbone: the argument {name} is {rate!r}, but must be a number from 0 to below 1")
        module = self._empty_backbone(self.model.model_copy(update=dropout))
        module.to_empty(device="cpu")
        module.load_state_dict(self._backbone_state())
        return module

    def check_complete(self) -> None:
        """Raise UserError if a weight that the config needs is missing or has another shape."""
        self._empty_backbone(self.model)

    def _backbone_state(self) -> dict[str, torch.Tensor]:
        return {key: value for key, value in self.state.items() if not key.startswith("head.")}

    def _empty_backbone(self, model: ModelConfig) -> Backbone:
        """Return a module without memory for its parameters, after a check that each has a weight of its shape."""
        with torch.device("meta"), WithoutInitialValues():
            module = Backbone(model, self.tower, self.special)
        weights = self._backbone_state()
        for key, parameter in module.state_dict().items():
            if key not in weights:
                raise UserError(
                    f"{self.name}: the weights lack {key}, so this is not a complete model; copy or export it again"
                )
            if weights[key].shape != parameter.shape:
                raise UserError(
                    f"{self.name}: {key} has the shape {tuple(weights[key].shape)}, but the model's config needs "
                    f"{tuple(parameter.shape)}; copy or export the model again"
                )
        return module

    def head_state(self) -> dict[str, torch.Tensor]:
        """Return the weights of the pretraining head, without the prefix `head.`; empty if the source has no head.

        A generator's head predicts tokens. A discriminator's head detects replaced tokens, except after an objective
        in which the discriminator predicts tokens.
        """
        return {key.removeprefix("head."): value for key, value in self.state.items() if key.startswith("head.")}


def load_pretrained(
    spec: str,
    tower: TowerName = "discriminator",
    vocab: Path | None = None,
    step: Step = None,
) -> Pretrained:
    """Load one tower of the model that `spec` names, with its vocabulary.

    `spec` is a run's folder, that of its export, a Hugging Face folder, a name on the Hub, or `random:CONFIG.yaml` for
    the random weights that a run with that config starts from. A Hugging Face folder holds one tower, which
    "discriminator" loads even if it is a generator. `vocab` is a vocab.txt for `random:` (None: that of its corpus),
    ignored otherwise. `step` is the number of steps after which a run's checkpoint was taken, "best" on held-out rows,
    or None for the newest; for other sources it must be None.
    """
    spec = locate_model(spec, tower)
    folder = Path(spec)
    if not spec.startswith(RANDOM) and is_run_folder(folder):
        return _from_run(folder, tower, step)
    if step is not None:
        raise UserError(f"{spec}: step is {step!r}, but only a run has checkpoints to choose from; leave the step out")
    if spec.startswith(RANDOM):
        return _with_random_weights(Path(spec.removeprefix(RANDOM)), tower, vocab)
    return _from_hugging_face(folder, tower)


def device_of_choice() -> torch.device:
    """Return the default GPU of this process if there is one, and the CPU otherwise.

    Raises NodeError if the node has GPUs, torch sees none, and the user has not asked for the CPU.
    """
    check_gpus()
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _tower_state(state: State, model: ModelConfig, tower: TowerName) -> dict[str, torch.Tensor]:
    """Return one tower's weights under the prefixes `embeddings.`, `encoder.` and, if it has a head, `head.`."""
    weights = standalone(state, model, tower)
    present = {name.partition(".")[0] for name in weights}
    if tower == "generator":
        is_causal_pair = "generator_reverse" in present
        if "generator_head" not in present or is_causal_pair:
            raise UserError(
                "--tower generator: the model has no bidirectional generator; leave --tower out to use the "
                "discriminator"
            )
        heads = {"generator_head": "head"}
    elif "discriminator_head" in present:
        heads = {"discriminator_head": "head"}  # it detects replaced tokens
    else:
        # It predicts tokens; the objective `all_tokens_mlm` also has a gate between copying and predicting a token.
        heads = {"token_head": "head", "copy_gate": "head.copy_gate"}
    return submodules(weights, {"embeddings": "embeddings", tower: "encoder", **heads})


def _with_random_weights(file: Path, tower: TowerName, vocab: Path | None) -> Pretrained:
    """Return a tower with the initial weights of the config `file`, and the vocabulary `vocab` or its corpus's."""
    config = load_config(file)
    vocabulary = Vocabulary.read(vocab) if vocab else _vocabulary_of_corpus(config, file)
    model = config.model.with_vocabulary_of(vocabulary.size)
    return Pretrained.from_state(
        name=f"{RANDOM}{file}",
        state=build_towers(model, config.seed, config.objective).state_dict(),
        model=model,
        vocabulary=vocabulary,
        lowercase=config.corpus.lowercase,
        tower=tower,
        reads_masks=_reads_masks(config.objective.name, tower),
        gives_energies=_gives_energies(config.objective.name, tower),
        trained_length=config.data.seq_len,
    )


def _vocabulary_of_corpus(config: Config, file: Path) -> Vocabulary:
    """Read the vocabulary of a config's corpus, which may not be built yet; verify it if there is a corpus.json."""
    store = open_store(config.data.corpus, config.data.endpoint_url)
    if store.exists(MANIFEST_KEY):
        return read_corpus_vocabulary(store, read_manifest(store).tokenizer)
    path = store.local_path(VOCAB_FILE)
    if path is None or not path.exists():
        raise UserError(
            f"{store.url}/{VOCAB_FILE}: no such vocabulary; pass the vocab.txt that belongs to {file} with --vocab"
        )
    return Vocabulary.read(path)


def _reads_masks(objective_name: str, tower: TowerName) -> bool:
    """Return whether a tower is trained on text with [MASK]: any generator, and the only network of `mlm`."""
    return tower == "generator" or objective_name == "mlm"


def _gives_energies(objective_name: str, tower: TowerName) -> bool:
    return tower == "discriminator" and objective_name == "electric"


def _from_run(run_dir: Path, tower: TowerName, step: Step) -> Pretrained:
    """Load a tower from a run's checkpoint; print a line to stderr for each damaged checkpoint that is skipped."""
    run = load_run_weights(run_dir, "newest" if step is None else step)
    for line in run.damaged:
        print(printable(line), file=sys.stderr)
    return Pretrained.from_state(
        name=f"{run_dir} at step {run.state.step:,}",
        state=run.weights,
        model=run.config.model,
        vocabulary=run.vocabulary,
        lowercase=run.tokenizer.lowercase,
        tower=tower,
        reads_masks=_reads_masks(run.config.objective.name, tower),
        gives_energies=_gives_energies(run.config.objective.name, tower),
        trained_length=run.config.data.seq_len,
    )


def _check_num_layers(folder: Path, weights: State, num_layers: int) -> None:
    matches = [_LAYER.match(name) for name in weights]
    num_found = len({match[1] for match in matches if match is not None})
    if num_found < num_layers:
        raise UserError(
            f"{folder}: the weights lack layers, because there are {num_found} and config.json has {num_layers}, so "
            f"this is not a complete model; copy or export it again"
        )


def _from_hugging_face(folder: Path, wanted: TowerName) -> Pretrained:
    """Load the model in a Hugging Face folder: a generator if its head predicts tokens, otherwise a discriminator.

    Raises UserError if the folder is not complete, or if a generator is `wanted` and it holds none.
    """
    model = read_hugging_face_model_config(folder)
    weights = read_weights(folder)
    predicts_tokens = family_of(model).token_mark in weights
    if wanted == "generator" and not predicts_tokens:
        raise UserError(
            f"{folder}: holds no generator, because its weights have no head that predicts tokens; leave the tower "
            f"out, or name the folder of a generator"
        )
    tower: TowerName = "generator" if predicts_tokens else "discriminator"
    vocabulary, lowercase = read_hugging_face_vocabulary(folder)
    _check_num_layers(folder, weights, model.discriminator.num_layers)
    state = convert_weights(folder, weights, model, tower)
    # The head of a model that was fine-tuned to classify texts is no pretraining head.
    if is_of_a_task(read_json_object(folder / "config.json", "copy or export the model again")):
        state = {name: weight for name, weight in state.items() if not name.startswith("discriminator_head.")}
    # A model of another program has no record, and counts as one that was trained on text with [MASK].
    record = read_pretraining_record(folder)
    return Pretrained.from_state(
        name=shown_name(folder),
        state=state,
        model=model,
        vocabulary=vocabulary,
        lowercase=lowercase,
        tower=tower,
        reads_masks=record is None or _reads_masks(record.objective, record.tower),
        gives_energies=record is not None and _gives_energies(record.objective, record.tower),
        trained_length=None if record is None else record.seq_len,
        may_have_unused_rows=True,
    )
