"""Count training FLOPs by the ELECTRA paper's method: its table of models from ELMo to T5, and the run of a config.

Guarantee: the first count of each model is that of google-research/electra's published script, flops_computation.py,
written as the sum of what a token costs. The second count is the one that MFU uses (`model/counts.py`): the matrix
products that the tensor cores have to do.

The paper's method: a matrix product costs 2mn per token. Backward costs as much as forward, so training is 2 x
forward. An embedding look-up counts as a product with a one-hot vector. Small operations count (GELU 8 per feature,
softmax 5, dropout 4, LayerNorm 5). The softmax over the vocabulary counts at 15.625 % of the positions, also for the
Large models, which mask 25 %. For ELMo and XLNet the script has the FLOPs of profiled forward passes.

MFU's method: matrix products only; look-ups are free, backward costs twice the forward, and the softmax counts at the
positions that are masked.

Limits: the paper's printed figures differ from its script for two models. ELMo: 3.3e18 against 3.41e18.
ELECTRA-Small: 1.4e18 against 1.29e18; with a generator of half the width, not a quarter, the script gives 1.42e18.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from electra_dist.config import Config, TowerConfig
from electra_dist.model.counts import run_flops
from electra_dist.run.folder import is_run_folder, open_run

# Operations per feature (for softmax: per score) as the paper's script counts them.
GELU = 8
SOFTMAX = 5
DROPOUT = 4
LAYER_NORM = 5
_BIAS = 1
_SUM = 1  # residual connection, or one more embedding
_SCALE = 1  # division of an attention score by sqrt(width of a head)
_CROSS_ENTROPY = 2

_SCRIPT_OUTPUT_SHARE = 0.15625  # share of positions at which the script counts a softmax over the vocabulary


@dataclass(frozen=True, kw_only=True)
class Network:
    """Sizes of one transformer, and its forward FLOPs per token by two methods of counting.

    A field may be 0; its comment says which value is then used.
    """

    hidden: int  # width of the states
    layers: int
    seq_len: int = 512  # tokens of a row, to all of which a token attends
    vocab: int = 30522
    embedding: int = 0  # width of the embedding tables; 0: hidden
    intermediate: int = 0  # width of the feed-forward layer; 0: 4 x hidden
    heads: int = 0  # attention heads; 0: hidden / 64
    attention: int = 0  # width of query, key and value; 0: hidden
    detects: bool = False  # True: a head with one logit per token; False: a head over the vocabulary
    masked: float = 0.15  # share of positions with a head over the vocabulary, for `matmul`
    output_share: float = _SCRIPT_OUTPUT_SHARE  # the same share in the script, for `paper`
    cross_attention: bool = False  # True: a decoder with two attention blocks per layer; both count the same

    @property
    def _embedding_width(self) -> int:
        return self.embedding or self.hidden

    @property
    def _inner_width(self) -> int:
        return self.intermediate or 4 * self.hidden

    @property
    def _attention_width(self) -> int:
        return self.attention or self.hidden

    @property
    def _num_heads(self) -> int:
        return self.heads or max(1, self.hidden // 64)

    @property
    def _num_attentions(self) -> int:
        return 2 if self.cross_attention else 1

    def paper(self) -> float:
        """Return the forward FLOPs per token by the paper's method: matrix products and small operations."""
        return self.layers * self._paper_layer() + self._paper_embeddings() + self._paper_head()

    def _paper_layer(self) -> int:
        """Return the forward FLOPs per token of one transformer layer by the paper's method.

        The terms are those of the function get_block_flops in the paper's script. A token attends to all tokens of its
        row.
        """
        hidden = self.hidden
        seq_len = self.seq_len
        inner = self._inner_width
        attention = self._attention_width

        query_key_value = 3 * (2 * hidden * attention + _BIAS * attention)
        scores = 2 * attention * seq_len
        softmax = (SOFTMAX + DROPOUT + _SCALE) * seq_len * self._num_heads
        weighted_values = 2 * hidden * seq_len
        # The LayerNorm after the attention lacks a factor `hidden` in the script.
        output_projection = 2 * hidden * hidden + (_BIAS + DROPOUT + _SUM) * hidden + LAYER_NORM
        one_attention = query_key_value + scores + softmax + weighted_values + output_projection

        expand = 2 * hidden * inner + (_BIAS + GELU) * inner
        contract = 2 * hidden * inner + (_BIAS + DROPOUT + _SUM + LAYER_NORM) * hidden
        return one_attention * self._num_attentions + expand + contract

    def _paper_embeddings(self) -> int:
        """Return the forward FLOPs per token of the embeddings, as get_embedding_flops in the paper's script."""
        hidden = self.hidden
        width = self._embedding_width
        num_segments = 2
        token_look_up = 2 * width * self.vocab
        position_and_segment_look_ups = 2 * width * (self.seq_len + num_segments)
        sum_norm_dropout = (2 * _SUM + LAYER_NORM + DROPOUT) * width
        flops = token_look_up + position_and_segment_look_ups + sum_norm_dropout
        if width != hidden:
            flops += 2 * hidden * width + _BIAS * hidden  # projection to the width of the states
        return flops

    def _paper_head(self) -> float:
        """Return the forward FLOPs per token of the head; a vocabulary head runs on the share `output_share`."""
        hidden = self.hidden
        embedding = self._embedding_width
        if self.detects:
            dense = 2 * hidden * hidden + (_BIAS + GELU) * hidden
            logit = 2 * hidden
            return dense + logit
        dense = 2 * hidden * embedding + (_BIAS + GELU + LAYER_NORM) * embedding
        logits = 2 * embedding * self.vocab
        softmax = (SOFTMAX + _CROSS_ENTROPY) * self.vocab
        return self.output_share * (dense + logits + softmax)

    def matmul(self) -> float:
        """Return the forward FLOPs per token of the matrix products, as MFU counts them.

        A head over the vocabulary is counted at the share `masked` of the positions.
        """
        hidden = self.hidden
        embedding = self._embedding_width
        attention = self._attention_width
        projections = 4 * 2 * hidden * attention  # query, key, value, output
        scores_and_values = 2 * 2 * self.seq_len * attention
        feed_forward = 2 * 2 * hidden * self._inner_width  # two matrices
        layer = (projections + scores_and_values) * self._num_attentions + feed_forward
        embedding_projection = 2 * embedding * hidden if embedding != hidden else 0
        if self.detects:
            head: float = 2 * hidden * hidden + 2 * hidden
        else:
            head = self.masked * (2 * hidden * embedding + 2 * embedding * self.vocab)
        return self.layers * layer + embedding_projection + head


@dataclass(frozen=True, kw_only=True)
class PaperFlops:
    """One model of the paper's table of FLOPs: its networks, the rows it trains on, and the printed figure."""

    name: str
    printed: str  # training FLOPs as the paper prints them; empty if the paper does not list the model
    networks: tuple[Network, ...] = ()  # empty for a model that is known by a profile only
    rows: float = 0.0  # rows of the training: batch x steps
    profiled: float = 0.0  # forward FLOPs of the whole training, where the script has a profile

    def paper(self) -> float:
        """Return the model's training FLOPs by the paper's method: 2 x the forward FLOPs of all rows."""
        forward_per_row = sum(network.paper() * network.seq_len for network in self.networks)
        return 2 * (self.profiled + forward_per_row * self.rows)

    def mfu(self) -> float | None:
        """Return the training FLOPs by MFU's method: 3 x the forward FLOPs; None if only a profile is known."""
        if not self.networks:
            return None
        forward_per_row = sum(network.matmul() * network.seq_len for network in self.networks)
        return 3 * forward_per_row * self.rows


def _electra(discriminator: Network, generator: int) -> tuple[Network, Network]:
    """Return the discriminator with a detection head, and a generator of equal sizes except its width `generator`."""
    return replace(discriminator, detects=True), replace(discriminator, hidden=generator)


_SMALL = Network(hidden=256, layers=12, seq_len=128, embedding=128)
_BASE = Network(hidden=768, layers=12, embedding=768)
_LARGE = _electra(Network(hidden=1024, layers=24, embedding=1024, masked=0.25), 256)
_BERT_LARGE = Network(hidden=1024, layers=24)
_ROBERTA = (Network(hidden=1024, layers=24, vocab=50265),)
_T5 = Network(hidden=1024, layers=24, vocab=32000, intermediate=65536, heads=128, attention=128 * 128)

TABLE = (
    # 768,648,884 words of LM1B, 10 epochs, 20 x 128 words per batch, times the profiled forward pass of a batch.
    PaperFlops(name="ELMo", printed="3.3e18", profiled=10 * 768_648_884 * 568_093_262_680 / (20 * 128)),
    PaperFlops(
        name="GPT",
        printed="4.0e19",
        networks=(Network(hidden=768, layers=12, vocab=40000, masked=1.0, output_share=1.0),),
        rows=128 * 960_800,
    ),
    PaperFlops(
        name="BERT-Small",
        printed="1.4e18",
        networks=(_SMALL,),
        rows=128 * 1.45e6,
    ),
    PaperFlops(name="BERT-Base", printed="6.4e19", networks=(_BASE,), rows=256 * 1e6),
    PaperFlops(name="BERT-Large", printed="1.9e20", networks=(_BERT_LARGE,), rows=256 * 1e6),
    PaperFlops(name="RoBERTa-100K", printed="6.4e20", networks=_ROBERTA, rows=8000 * 1e5),
    PaperFlops(name="RoBERTa-500K", printed="3.2e21", networks=_ROBERTA, rows=8000 * 5e5),
    # 500,000 steps of 8192 rows, times the profiled forward pass of 32 rows.
    PaperFlops(name="XLNet", printed="3.9e21", profiled=500_000 * 8192 * 15_064_773_691_518 / 32),
    PaperFlops(
        name="ALBERT",
        printed="3.1e22",
        networks=(Network(hidden=4096, layers=12, vocab=30000, embedding=128),),
        rows=4096 * 1.5e6,
    ),
    PaperFlops(
        name="T5-11B",
        printed="",
        networks=(
            replace(_T5, output_share=0.0, masked=0.0),
            replace(_T5, output_share=1.0, masked=1.0, cross_attention=True),
        ),
        rows=2048 * 1e6,
    ),
    PaperFlops(name="BERT-Large (theirs)", printed="7.1e20", networks=(_BERT_LARGE,), rows=2048 * 464_000),
    PaperFlops(name="ELECTRA-Small", printed="1.4e18", networks=_electra(_SMALL, 64), rows=128 * 1e6),
    PaperFlops(name="  generator 1/2", printed="1.4e18", networks=_electra(_SMALL, 128), rows=128 * 1e6),
    PaperFlops(name="ELECTRA-Base", printed="6.4e19", networks=_electra(_BASE, 256), rows=256 * 766_000),
    PaperFlops(name="ELECTRA-400K", printed="7.1e20", networks=_LARGE, rows=2048 * 400_000),
    PaperFlops(name="ELECTRA-1.75M", printed="3.1e21", networks=_LARGE, rows=2048 * 1_750_000),
)


def run_flops_by_paper(config: Config) -> float | None:
    """Return the training FLOPs of a whole run as the ELECTRA paper counts; None if its method does not cover the run.

    The method covers `mlm` (one network) and `rtd` (the discriminator, and the generator if it is trained), but not
    `model.architecture: modern`, other objectives, a frozen generator, two-stage training and joint MLM.
    """
    model = config.model
    objective = config.objective
    is_plain_rtd = objective.name == "rtd" and objective.generator != "frozen"
    if model.architecture == "modern":
        return None
    has_more_parts = objective.generator_only_steps > 0 or objective.discriminator_mlm_weight > 0
    discriminator = _network(config, model.discriminator, model.embedding_size)
    if objective.name == "mlm":
        networks = [discriminator]
    elif is_plain_rtd and not has_more_parts:
        networks = [replace(discriminator, detects=True)]
        if objective.generator == "trained":
            networks.append(_network(config, model.generator, model.generator_embedding_width))
    else:
        return None
    rows = config.train.global_batch * config.train.num_steps
    return PaperFlops(name=config.run_dir, printed="", networks=tuple(networks), rows=rows).paper()


def _network(config: Config, tower: TowerConfig, embedding_size: int) -> Network:
    """Return one network with a head over the vocabulary; `embedding_size` is the width of its embedding tables."""
    return Network(
        hidden=tower.hidden_size,
        layers=tower.num_layers,
        seq_len=config.data.seq_len,
        vocab=config.model.vocab_size,
        embedding=embedding_size,
        intermediate=tower.intermediate_size,
        heads=tower.num_heads,
    )


def generator_training(config: Config) -> tuple[str, str]:
    """Return two texts: the FLOPs that a frozen generator's own training took, and where this number comes from.

    All steps of the run that trained the generator are counted. For a Hugging Face folder the number is "not known".
    """
    folder = Path(config.train.init_generator_from or "")
    if not is_run_folder(folder):
        return "not known", f"not in the run's FLOP; {folder} is not a run folder"
    source = open_run(folder)
    return f"{run_flops(source):.2e} FLOP", f"not in the run's FLOP; {source.train.num_steps:,} steps of {folder}"
