"""A step's rows, masks and samples do not depend on the number of ranks, restarts or micro-batches.

They are compared element by element with those of one uninterrupted rank. The order, loader, step, masking, objective
and sampler are the real ones; the towers are replaced by fakes whose logits are a fixed table.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from electra_kernels.discriminator_tail import RtdOutput
from electra_kernels.mlm_head import MlmHeadOutput, sample_reference
from electra_kernels.operation_types import SpecialIds
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.real_runs import SEQ_LEN, SPECIAL, VOCAB_SIZE, synthetic_rows, write_corpus
from torch import nn

from electra_dist.config import ObjectiveConfig
from electra_dist.data import order as order_module
from electra_dist.data.corpora import Corpora
from electra_dist.data.loader import RowLoader
from electra_dist.data.manifest import CorpusManifest
from electra_dist.data.order import NUM_ROUNDS, CorpusOrder, RowOrder
from electra_dist.data.receipt import Receipt
from electra_dist.data.shard_cache import ShardCache
from electra_dist.objectives.base import Schedules, StepInput, StepOutput
from electra_dist.objectives.masking import num_slots
from electra_dist.objectives.rtd import ReplacedTokenDetection
from electra_dist.store.open_store import open_store
from electra_dist.train.step import TrainStep

WORLD_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
GLOBAL_BATCH = 48
SEED = 0x0123_4567_89AB_CDEF
NUM_SLOTS = num_slots(ObjectiveConfig().mask_prob, SEQ_LEN)
LOGITS_VV = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))


class FixedEmbeddings:
    """Fake of the embeddings that keeps its inputs; a position's only feature is the position."""

    word = SimpleNamespace(weight=LOGITS_VV)

    def __init__(self) -> None:
        self.inputs: list[torch.Tensor] = []  # the generator's, then the discriminator's

    def __call__(self, ids_BS: torch.Tensor, layout: Any, dropout_keys: Any) -> torch.Tensor:
        self.inputs.append(ids_BS)
        return torch.arange(SEQ_LEN).expand(ids_BS.shape)[..., None].float()


class FixedTowers(nn.Module):
    """Fake of ElectraTowers that keeps its inputs; the logits of a slot are the table's row of its true token."""

    def __init__(self) -> None:
        super().__init__()
        self.model = SimpleNamespace(architecture="bert")
        self.embeddings = FixedEmbeddings()
        self.slots = torch.empty(0)  # position, weight and sample of each slot, [B, 3 N]

    def generator(self, hidden: torch.Tensor, bias: Any, noise: Any) -> torch.Tensor:
        return hidden

    discriminator = generator

    def generator_head(
        self,
        position_M1: torch.Tensor,
        logits_VV: torch.Tensor,
        target_M: torch.Tensor,
        weight_M: torch.Tensor,
        *,
        disallow_correct: bool,
        seed: int,
        step: int,
        row_M: torch.Tensor,
        **_: Any,
    ) -> MlmHeadOutput:
        sampled_M = sample_reference(logits_VV[target_M], seed, step, row_M)
        parts = (position_M1[:, 0].long(), weight_M.long(), sampled_M)
        self.slots = torch.cat([part.view(-1, NUM_SLOTS) for part in parts], 1)
        return MlmHeadOutput(torch.zeros(()), weight_M.sum(), sampled_M, torch.zeros(()), torch.zeros(()))

    def discriminator_head(
        self, hidden: torch.Tensor, label_BS: torch.Tensor, mask_BS: torch.Tensor, **_: Any
    ) -> RtdOutput:
        zero = torch.zeros(())
        return RtdOutput(zero, mask_BS.sum(), torch.zeros(label_BS.numel()), zero, label_BS.sum(), zero, zero)


class Recorder:
    """Fake of the engine that runs the objective's forward pass and records everything that it draws, row by row."""

    device = torch.device("cpu")
    loss_scale = None

    def __init__(self, objective: ObjectiveConfig) -> None:
        self.towers = FixedTowers()
        self.module = ReplacedTokenDetection(self.towers, objective, special_ids(), "reference")  # type: ignore[arg-type]
        self.drawn: dict[tuple[int, int], np.ndarray] = {}  # (step, row of the global batch)

    def forward(self, step_input: StepInput) -> StepOutput:
        self.towers.embeddings.inputs.clear()
        out = self.module(step_input)
        everything = torch.cat(
            [step_input.ids_BS, *self.towers.embeddings.inputs, out.label_BS.long(), self.towers.slots], 1
        )
        for row, drawn in zip(step_input.row_B.tolist(), everything.numpy()):
            assert (step_input.step, row) not in self.drawn
            self.drawn[step_input.step, row] = drawn
        return out

    def backward(self, loss: torch.Tensor) -> None:
        pass

    def step(
        self, learning_rate: float, accept: Any, generator_learning_rate: float | None, numbers: Any
    ) -> tuple[float, bool]:
        return numbers.read_with(torch.zeros(())), accept()


def special_ids() -> SpecialIds:
    """Return the ids of the synthetic corpus's special tokens."""
    return SpecialIds.from_tokens(SPECIAL)


class Corpus:
    """A corpus of uneven shards, its rows, and their order."""

    def __init__(self, folder: Path, rows_per_shard: Sequence[int], window_shards: int) -> None:
        self.manifest: CorpusManifest = write_corpus(str(folder), list(rows_per_shard))
        self.store = open_store(str(folder))
        self.rows = np.concatenate([synthetic_rows(count, number) for number, count in enumerate(rows_per_shard)])
        self.order = RowOrder([CorpusOrder(rows_per_shard, SEED, window_shards)])


@pytest.fixture(autouse=True, scope="module")
def no_collectives() -> Iterator[None]:
    """Replace all-reduce by nothing: the ranks run one after another, and no draw depends on a sum over ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", lambda tensor: None)
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An endless iterator of new folders."""
    root = tmp_path_factory.mktemp("elastic")
    return (root / str(number) for number in itertools.count())


Drawn = dict[tuple[int, int], np.ndarray]
Run = tuple[Drawn, dict[int, np.ndarray], dict[int, Receipt]]


def leg(
    corpus: Corpus,
    objective: ObjectiveConfig,
    world_size: int,
    micro_batch: int,
    steps: range,
    skip_steps: Collection[int] = (),
) -> Run:
    """Run the steps of one start on all ranks, one after another.

    Returns:
        Everything drawn, by (step, row of the global batch); the row ids of each step, in the order of its rows; and
        the receipt of each step.
    """
    recorder = Recorder(objective)
    train_step = TrainStep(recorder, SEED, micro_batch, Schedules(objective, 100))  # type: ignore[arg-type]
    wanted = [step for step in steps if step not in skip_steps]
    row_ids = {step: np.full(GLOBAL_BATCH, -1) for step in wanted}
    receipts = {step: Receipt() for step in wanted}
    for rank in range(world_size):
        cache = ShardCache(Corpora.of(corpus.store, corpus.manifest), Path("unused"), fetch_threads=1)
        loader = RowLoader(cache, corpus.order, GLOBAL_BATCH, rank, world_size, steps.start, skip_steps)
        for step in wanted:
            batch = loader.next()
            assert batch.step == step
            assert (corpus.rows[batch.row_ids] == batch.ids).all()
            row_ids[step][batch.row0 : batch.row0 + len(batch.ids)] = batch.row_ids
            receipts[step] += batch.receipt
            train_step(batch, 1e-4)
        loader.close()
        cache.close()
    return recorder.drawn, row_ids, receipts


def assert_equal(found: Run, uncut: Run, steps: Collection[int]) -> None:
    """Assert that the draws, row ids and receipts of `steps` are those of the uninterrupted run."""
    drawn, row_ids, receipts = found
    assert drawn.keys() == {(step, row) for step in steps for row in range(GLOBAL_BATCH)}
    for key, values in drawn.items():
        np.testing.assert_array_equal(values, uncut[0][key], err_msg=str(key))
    for step in steps:
        np.testing.assert_array_equal(row_ids[step], uncut[1][step])
        assert receipts[step] == uncut[2][step] == Receipt.of(uncut[1][step])


def assert_epochs_are_whole(corpus: Corpus, row_ids: dict[int, np.ndarray]) -> None:
    """Assert that every epoch that lies completely within the steps has each row exactly once."""
    sequence = np.concatenate([row_ids[step] for step in sorted(row_ids)])
    rows_per_epoch = len(corpus.rows)
    first_begin = -min(row_ids) * GLOBAL_BATCH % rows_per_epoch
    for first in range(first_begin, len(sequence) - rows_per_epoch + 1, rows_per_epoch):
        assert sorted(sequence[first : first + rows_per_epoch].tolist()) == list(range(rows_per_epoch))


def micro_batches(world_size: int) -> list[int]:
    """Return all micro-batch sizes that divide a rank's share of the global batch."""
    share = GLOBAL_BATCH // world_size
    return [size for size in range(1, share + 1) if share % size == 0]


starts = st.sampled_from(WORLD_SIZES).flatmap(
    lambda world_size: st.tuples(
        st.just(world_size), st.sampled_from(micro_batches(world_size)), st.integers(min_value=1, max_value=4)
    )
)
cut_runs = st.lists(starts, min_size=2, max_size=5).filter(
    lambda legs: all(previous[0] != following[0] for previous, following in itertools.pairwise(legs))
)


@given(
    rows_per_shard=st.lists(st.integers(1, 24), min_size=1, max_size=7).filter(lambda rows: sum(rows) <= 96),
    window_shards=st.integers(1, 4),
    masking=st.sampled_from(["without_replacement", "reference"]),
    first_step=st.integers(0, 40) | st.integers(0, 10**9),
    legs=cut_runs,
    skipped=st.sets(st.integers(0, 12), max_size=3),
)
@example(  # 8 starts over more than 8 epochs, with every number of ranks, the largest first
    rows_per_shard=[21, 5, 13, 1],
    window_shards=2,
    masking="without_replacement",
    first_step=0,
    legs=[(world_size, micro_batches(world_size)[0], 1) for world_size in reversed(WORLD_SIZES)],
    skipped=set(),
)
@example(  # the group of steps that a loader locates together ends in the first leg, and the next begins with a skip
    rows_per_shard=[21, 5, 13, 1],
    window_shards=2,
    masking="reference",
    first_step=14,
    legs=[(2, 24, 4), (1, 48, 1)],
    skipped={2},
)
@settings(max_examples=8, deadline=None)
def test_any_ranks_restarts_and_micro_batches_draw_the_same_as_one_uninterrupted_rank(
    folders: Iterator[Path],
    rows_per_shard: list[int],
    window_shards: int,
    masking: Any,
    first_step: int,
    legs: list[tuple[int, int, int]],
    skipped: set[int],
) -> None:
    """There are up to four restarts, each with another number of ranks, over several epochs.

    Skipped steps draw nothing, and the other steps do not change.
    """
    corpus, objective = Corpus(next(folders), rows_per_shard, window_shards), ObjectiveConfig(masking=masking)
    num_steps = sum(length for *_, length in legs)
    uncut = leg(corpus, objective, 1, GLOBAL_BATCH, range(first_step, first_step + num_steps))
    assert_epochs_are_whole(corpus, uncut[1])
    start, skip_steps = first_step, {first_step + number for number in skipped}
    for world_size, micro_batch, length in legs:
        steps = range(start, start + length)
        found = leg(corpus, objective, world_size, micro_batch, steps, skip_steps)
        assert_equal(found, uncut, set(steps) - skip_steps)
        start += length


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_micro_batch_of_every_number_of_ranks_draws_the_same(folders: Iterator[Path], world_size: int) -> None:
    """The step is one in the middle of which an epoch ends."""
    corpus, objective, step = Corpus(next(folders), [30, 22, 9], 2), ObjectiveConfig(), range(1, 2)
    uncut = leg(corpus, objective, 1, GLOBAL_BATCH, step)
    for micro_batch in micro_batches(world_size):
        assert_equal(leg(corpus, objective, world_size, micro_batch, step), uncut, step)


def test_the_recorder_records_masks_samples_and_labels_and_steps_differ(folders: Iterator[Path]) -> None:
    """This shows that the comparisons of draws in this file are not empty."""
    corpus = Corpus(next(folders), [48], 1)
    drawn, row_ids, _ = leg(corpus, ObjectiveConfig(), 1, GLOBAL_BATCH, range(2))
    blocks = (SEQ_LEN, 2 * SEQ_LEN, 3 * SEQ_LEN, 4 * SEQ_LEN, 4 * SEQ_LEN + NUM_SLOTS, 4 * SEQ_LEN + 2 * NUM_SLOTS)
    seen: Counter[str] = Counter()
    for row in range(GLOBAL_BATCH):
        ids, masked, corrupted, label, position, weight, sampled = np.split(drawn[0, row], blocks)
        assert (ids == corpus.rows[row_ids[0][row]]).all()
        used = weight > 0
        assert (corrupted[position[used]] == sampled[used]).all()
        assert ((corrupted != ids) == label).all()
        assert set(np.flatnonzero(masked != ids)) <= set(position[used])
        seen.update(masks=int((masked == SPECIAL["[MASK]"]).sum()), labels=int(label.sum()), slots=int(used.sum()))
    # Nearly every sample of 300 tokens is wrong, and 85 % of the slots show [MASK].
    assert seen["labels"] > 0.9 * seen["slots"] > 200
    assert 0.75 * seen["slots"] < seen["masks"] < 0.95 * seen["slots"]
    same = [np.array_equal(drawn[0, row][-2 * NUM_SLOTS :], drawn[1, row][-2 * NUM_SLOTS :]) for row in range(48)]
    assert not any(same)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counters of the words that Philox generated for the order, and of the epochs that were laid out."""
    counts: Counter[str] = Counter()
    philox, lay_out = order_module.philox4x32, CorpusOrder._lay_out

    def counting_philox(counter: Any, seed: int) -> Any:
        words = philox(counter, seed)
        counts["words"] += words[0].size
        return words

    def counting_lay_out(self: CorpusOrder, epoch: int) -> Any:
        counts["epochs"] += 1
        return lay_out(self, epoch)

    monkeypatch.setattr(
        order_module.cpu_library, "permute", None
    )  # the C function does the same work, but cannot be counted
    monkeypatch.setattr(order_module, "philox4x32", counting_philox)
    monkeypatch.setattr(CorpusOrder, "_lay_out", counting_lay_out)
    return counts


ROWS_PER_SHARD = [640 + 3 * (number % 7) for number in range(120)]


@pytest.mark.parametrize("epoch", [0, 1, 17, 10**4, 10**6, 2**32 - 2])
@pytest.mark.parametrize("share", [0.0, 0.31, 0.77, 0.999999])
def test_the_work_of_locating_does_not_depend_on_the_position(work: Counter[str], epoch: int, share: float) -> None:
    """For 2,048 positions, the shards of one epoch and the positions are permuted, at most a tenth of them twice."""
    order, num_positions = CorpusOrder(ROWS_PER_SHARD, SEED, 16), 2_048
    first = int((epoch + share) * order.rows_per_epoch)
    _, shards, rows = order.locate(np.arange(first, first + num_positions))
    assert len(set(zip(shards.tolist(), rows.tolist()))) == num_positions or share > 0.99  # two epochs may share rows
    num_epochs = 2 if share > 0.99 else 1
    assert work["epochs"] == num_epochs
    least = NUM_ROUNDS * (num_epochs * len(ROWS_PER_SHARD) + num_positions)
    assert least <= work["words"] <= 1.1 * least


def test_a_loader_starts_at_any_step_with_the_same_work(folders: Iterator[Path], work: Counter[str]) -> None:
    """Epochs laid out, words drawn and shards opened until the first batch are counted, in epochs 0 to 10 million."""
    corpus = Corpus(next(folders), [64] * 12, 3)
    opened: Counter[int] = Counter()

    class CountingCache(ShardCache):
        def open(self, shard_index: int) -> Any:
            opened[int(shard_index)] += 1
            return super().open(shard_index)

    costs = []
    steps_per_epoch = 16  # 768 rows of 48 a step
    for epoch in (0, 1, 10**3, 10**7):
        work.clear()
        opened.clear()
        order = RowOrder([CorpusOrder([64] * 12, SEED, 3)])
        cache = CountingCache(Corpora.of(corpus.store, corpus.manifest), Path("unused"), fetch_threads=1)
        loader = RowLoader(cache, order, GLOBAL_BATCH, 0, 1, epoch * steps_per_epoch)
        batch = loader.next()
        loader.close()
        cache.close()
        assert batch.step == epoch * steps_per_epoch
        assert work["epochs"] == 1
        assert opened.total() <= 4 * 3  # at most four steps read ahead, each within one window of three shards
        costs.append(work["words"])
    assert max(costs) <= 1.1 * min(costs)
    assert min(costs) >= NUM_ROUNDS * (12 + steps_per_epoch * GLOBAL_BATCH)
