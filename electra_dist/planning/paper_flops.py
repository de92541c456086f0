"""The paper's table of training FLOPs, by the paper's own method, from ELMo to T5.

Guarantee: the counts of google-research/electra's published script, written as sums of what a token costs. Beside each
the count that MFU is made of (`flops.py`): what the tensor cores had to do.

The paper's method: 2mn for a matrix product; backward costs as much as forward, so training is 2 x forward; an
embedding look-up is a product with a one-hot vector; small operations count (GELU 8 a feature, softmax 5, dropout 4,
LayerNorm 5); the vocabulary's softmax at 15.625 % of the positions, also for the Large models, which mask 25 %. ELMo
and XLNet are profiled forward passes, taken over as numbers.

MFU's method: matrix products only, look-ups free, backward twice the forward, softmax at the positions really masked.

Where the paper's printed figures differ from its script, the table shows it. ELMo: 3.3e18 against 3.41e18.
ELECTRA-Small: 1.4e18 against 1.29e18; with a generator of half the width, not a quarter, the script gives 1.42e18.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

GELU, SOFTMAX, DROPOUT, LAYER_NORM = 8, 5, 4, 5  # operations for each feature
_SCRIPT_OUTPUT_SHARE = 0.15625  # positions that the script gives a softmax over the vocabulary


@dataclass(frozen=True, kw_only=True)
class Network:
    """One transformer. Costs are forward FLOPs of one token."""

    hidden: int
    layers: int
    seq_len: int = 512
    vocab: int = 30522
    embedding: int = 0  # width of the tables; 0: hidden
    intermediate: int = 0  # 0: 4 x hidden
    heads: int = 0  # 0: hidden / 64
    attention: int = 0  # width of query, key and value; 0: hidden
    detects: bool = False  # a head of one logit instead of a token head
    masked: float = 0.15  # positions with a token head, for MFU
    output_share: float = _SCRIPT_OUTPUT_SHARE  # the same as the script has it
    cross_attention: bool = False  # a decoder: every attention twice

    @property
    def _widths(self) -> tuple[int, int, int, int]:
        embedding, inner = self.embedding or self.hidden, self.intermediate or 4 * self.hidden
        return embedding, inner, self.heads or max(1, self.hidden // 64), self.attention or self.hidden

    def paper(self) -> float:
        """Forward FLOPs of a token as the paper counts."""
        (e, i, heads, a), h, s, vocab = self._widths, self.hidden, self.seq_len, self.vocab
        project = 3 * (2 * h * a + a)
        attend = 2 * a * s + (SOFTMAX + DROPOUT + 1) * s * heads + 2 * h * s
        merge = 2 * h * h + h + DROPOUT * h + h + LAYER_NORM  # its LayerNorm lacks a factor h in the script
        feed_forward = 4 * h * i + (GELU + 1) * i + (1 + DROPOUT + 1 + LAYER_NORM) * h
        layer = (project + attend + merge) * (2 if self.cross_attention else 1) + feed_forward
        look_up = 2 * e * vocab + 2 * e * (s + 2) + (2 + LAYER_NORM + DROPOUT) * e
        if e != h:
            look_up += 2 * h * e + h
        if self.detects:
            head: float = 2 * h * h + (1 + GELU) * h + 2 * h
        else:
            head = self.output_share * (
                2 * e * vocab + 2 * h * e + (1 + GELU + LAYER_NORM) * e + (SOFTMAX + 2) * vocab
            )
        return self.layers * layer + look_up + head

    def matmul(self) -> float:
        """Forward FLOPs of a token in matrix products."""
        (e, i, _, a), h = self._widths, self.hidden
        attention = 4 * 2 * h * a + 2 * 2 * self.seq_len * a
        layer = attention * (2 if self.cross_attention else 1) + 2 * 2 * h * i
        head: float = 2 * h * h + 2 * h if self.detects else self.masked * (2 * h * e + 2 * e * self.vocab)
        return self.layers * layer + (2 * e * h if e != h else 0) + head


@dataclass(frozen=True, kw_only=True)
class PaperFlops:
    """One model of the table."""

    name: str
    printed: str  # in the paper; empty: not there
    networks: tuple[Network, ...] = ()
    rows: float = 0.0  # of training: batch x steps
    profiled: float = 0.0  # forward FLOPs of the whole training, where they were measured

    def paper(self) -> float:
        """Training FLOPs by the paper's method: forward and as much again."""
        return 2 * (self.profiled + sum(n.paper() * n.seq_len for n in self.networks) * self.rows)

    def mfu(self) -> float | None:
        """Training FLOPs by MFU's method; None where only a profile is known."""
        if not self.networks:
            return None
        return 3 * sum(network.matmul() * network.seq_len for network in self.networks) * self.rows


def _electra(discriminator: Network, generator: int) -> tuple[Network, Network]:
    """Both towers; the generator has the discriminator's layers and tables and a width of its own."""
    return replace(discriminator, detects=True), replace(discriminator, hidden=generator)


_SMALL = Network(hidden=256, layers=12, seq_len=128, embedding=128)
_BASE = Network(hidden=768, layers=12, embedding=768)
_LARGE = _electra(Network(hidden=1024, layers=24, embedding=1024, masked=0.25), 256)
_BERT_LARGE = Network(hidden=1024, layers=24)
_ROBERTA = (Network(hidden=1024, layers=24, vocab=50265),)
_T5 = Network(hidden=1024, layers=24, vocab=32000, intermediate=65536, heads=128, attention=128 * 128)

TABLE = (
    # 768,648,884 words of LM1B, 10 epochs, 20 x 128 words a batch, profiled forward pass of a batch.
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
    # A profiled forward pass of 32 rows.
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
