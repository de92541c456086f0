"""Loading takes the newest good checkpoint of all targets, and an older copy or step where one is damaged."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import checkpoints as small
from support.checkpoints import committed, folder_name

from electra_dist.checkpoint.chosen_weights import assemble
from electra_dist.checkpoint.manifest import MANIFEST, RunState
from electra_dist.checkpoint.reader import load_newest
from electra_dist.checkpoint.stored_copies import SET_ASIDE, set_all_aside
from electra_dist.errors import StorageLost, StoreAway, StoreError, StoreExhausted, UserError
from electra_dist.store.interface import Store
from electra_dist.store.open_store import LocalStore, open_store
from electra_dist.store.patience import Patience


def load(targets: list[Store], **expected: object) -> tuple[RunState | None, list[str], small.Content]:
    """Load on one rank; return the loaded state, the notes and the values. `expected` replaces fields of the state."""
    values = small.empty()
    found, set_aside, notes = load_newest(targets, small.share(values, 0, 1), small.state_at(0, **expected))
    return found, [*set_aside, *notes], values


@pytest.mark.usefixtures("one_rank")
def test_newest_good_checkpoint_is_loaded_and_a_damaged_newer_one_is_set_aside(target: Store, tmp_path: Path) -> None:
    for step in (10, 20, 35):
        small.save([target], step)
    small.damage(target, small.file_of(target, 35), at=-5)
    found, notes, values = load([target])
    assert found == small.state_at(20) and small.equal(values, small.content(20))
    assert len(notes) == 1 and f"{target.url}/{folder_name(35, 1)} is set aside: exp_avg_sq of" in notes[0]
    assert "step 20 is used instead, which is 15 steps earlier" in notes[0]
    assert target.exists(f"{folder_name(35, 1)}/{SET_ASIDE}") and len(committed(target)) == 2
    assert load([target])[1] == []  # it is not tried again


@pytest.mark.usefixtures("one_rank")
def test_load_without_a_good_checkpoint_is_refused_lists_all_and_changes_nothing(
    target: Store, tmp_path: Path
) -> None:
    """Only a store that never had a checkpoint lets a run begin at step 0."""
    assert load([target])[:2] == (None, [])
    for step in (10, 20):
        small.save([target], step)
        target.delete(small.file_of(target, step))
    keys = target.list()
    for _ in range(2):
        with pytest.raises(UserError) as caught:
            load([target])
        message = str(caught.value)
        assert (
            len(re.findall(r"rank-00001\.\S+\.safetensors is missing", message)) == 2 and "--from-scratch" in message
        )
        assert f"{target.url}/{folder_name(10, 1)}" in message and f"{target.url}/{folder_name(20, 1)}" in message
        assert target.list() == keys


@pytest.mark.usefixtures("one_rank")
def test_a_run_begun_from_scratch_finds_no_checkpoint_and_all_files_are_kept(
    two_targets: list[Store], tmp_path: Path
) -> None:
    for step in (10, 20):
        small.save(two_targets, step)
    num_objects = len(two_targets[0].list("step-"))
    lines = set_all_aside(two_targets)
    assert [f"{folder_name(step, 1)} is set aside" in line for step, line in zip((10, 20, 10, 20), lines)] == [
        True
    ] * 4
    assert load(two_targets)[:2] == (None, [])
    # Each manifest has a new name, and the reason lies beside it.
    assert len(two_targets[0].list("step-")) == num_objects + 2


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("bad", [0, 1])
def test_same_step_of_the_other_target_is_preferred_to_an_older_step(
    two_targets: list[Store], tmp_path: Path, bad: int
) -> None:
    for step in (10, 20):
        small.save(two_targets, step)
    small.damage(two_targets[bad], small.file_of(two_targets[bad], 20), at=3)
    found, notes, values = load(two_targets)
    assert found == small.state_at(20) and small.equal(values, small.content(20))
    if bad == 0:
        assert f"; the same step is good in {two_targets[1].url}; run `electra-dist checkpoint repair /" in notes[0]
        assert not two_targets[0].exists(f"{folder_name(20, 1)}/{MANIFEST}")
    else:  # the copy of the first target is good, so the second is not read
        assert notes == []


@pytest.mark.usefixtures("one_rank")
def test_newest_checkpoint_of_all_targets_is_loaded(two_targets: list[Store], tmp_path: Path) -> None:
    small.save(two_targets, 10)
    small.save(two_targets[1:], 20)
    small.save(two_targets[:1], 20, attempt=2, run=1)
    found, notes, values = load(two_targets)
    assert (found, notes) == (small.state_at(20, 2), [])
    assert small.equal(values, small.content(20, run=1))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("difference", "reason"),
    [
        ({"identity_sha256": "1" * 64}, "another config"),
        ({"corpus_fingerprint": "other"}, "another corpus"),
        ({"shapes": {"word.weight": [1]}}, "other parameter shapes"),
        ({"shared": {}}, "other shared parameters"),
        ({"skipped": (3, 9)}, "skips other steps"),
        ({"skipped": ()}, "skips other steps"),
    ],
)
def test_checkpoint_of_another_run_is_not_loaded(tmp_path: Path, difference: dict, reason: str) -> None:
    store = open_store(str(tmp_path))
    small.save([store], 10, fields={"skipped": (3,)})
    with pytest.raises(UserError, match=reason):
        load([store], **{"skipped": (3,), **difference})


@pytest.mark.usefixtures("one_rank")
def test_checkpoint_before_newly_skipped_steps_is_loaded(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    small.save([store], 10, fields={"skipped": (3,)})
    found, notes, _ = load([store], skipped=(3, 10, 11))
    assert found is not None and notes == []


@pytest.mark.usefixtures("one_rank")
def test_checkpoints_that_a_rollback_has_discarded_let_the_run_begin_again_unless_one_is_damaged(
    two_targets: list[Store], tmp_path: Path
) -> None:
    """A damaged one may be the one to go back to, once it is repaired."""
    for step in (10, 20):
        small.save(two_targets, step)
    expected = small.state_at(0, skipped=(5, 6, 7))
    fragments = small.share(small.empty(), 0, 1)
    manifests = [f"{folder_name(10, 1)}/{MANIFEST}"] * 2
    contents = [target.read(manifest) for target, manifest in zip(two_targets, manifests)]
    for target, manifest in zip(two_targets, manifests):
        small.damage(target, manifest)
    with pytest.raises(UserError, match="--from-scratch"):
        load_newest(two_targets, fragments, expected, stopped={5, 6, 7})
    with pytest.raises(UserError, match="skips other steps"):
        load_newest(two_targets, fragments, expected, stopped={5, 6})  # the user skips step 7
    for target, manifest, content in zip(two_targets, manifests, contents):
        target.write(manifest, content)
    found, notes, _ = load_newest(two_targets, fragments, expected, stopped={5, 6, 7})
    assert found is None and len(notes) == 4 and "which is 20 steps earlier" in notes[0]
    assert [committed(target) for target in two_targets] == [[], []]


class Unreadable(LocalStore):
    """Store in which every read of a range fails."""

    def read_range(self, key: str, start: int, length: int) -> memoryview:
        raise StoreExhausted(f"{self.url}/{key}: failed 30 times in a row; check the service, then start again")


@pytest.mark.usefixtures("one_rank")
def test_checkpoint_that_cannot_be_read_is_taken_from_the_other_target_and_never_set_aside(tmp_path: Path) -> None:
    targets = [Unreadable(tmp_path / "a"), open_store(str(tmp_path / "b"))]
    for step in (10, 20):
        small.save([open_store(target.url) for target in targets], step)
    found, notes, _ = load(targets)
    assert found == small.state_at(20)
    assert len(notes) == 1
    assert f"{targets[0].url}/{folder_name(20, 1)} could not be read" in notes[0]
    assert f"its copy in {targets[1].url} is used" in notes[0]
    with pytest.raises(StoreError, match="failed 30 times"):
        load(targets[:1])
    assert len(committed(targets[0])) == 2  # nothing is set aside


class Away(LocalStore):
    """Store that can be listed, and of which nothing can be read while it is away; it waits then."""

    is_away = True
    on_read: Callable[[], None] = staticmethod(lambda: None)

    def _wait(self) -> None:
        def check() -> None:
            self.on_read()
            if self.is_away:
                raise StoreAway(f"{self.url}: no answer in time; check the mount")

        self.patience.call(check)

    def read(self, key: str) -> bytes:
        self._wait()
        return super().read(key)

    def read_range(self, key: str, start: int, length: int) -> memoryview:
        self._wait()
        return super().read_range(key, start, length)


@pytest.fixture
def away_and_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Away, LocalStore]:
    """A target that is away, with a patience of 10 minutes, and one that answers; both have the steps 10 and 20."""
    monkeypatch.setattr("electra_dist.checkpoint.stored_copies.FIRST_TRY_S", 0.1)
    patience = Patience(600.0, lambda line: None)
    away, good = Away(tmp_path / "away", patience), LocalStore(tmp_path / "good", patience)
    for step in (10, 20):
        small.save([LocalStore(tmp_path / "away"), good], step)
    return away, good


@pytest.mark.usefixtures("one_rank")
def test_a_target_that_is_away_is_not_waited_for_while_another_has_a_good_copy(
    away_and_good: tuple[Away, LocalStore],
) -> None:
    away, good = away_and_good
    found, notes, values = load([away, good])
    assert found == small.state_at(20) and small.equal(values, small.content(20))
    assert len(notes) == 1 and f"{away.url}/{folder_name(20, 1)} could not be read: {away.url}: no answer" in notes[0]
    state, _, _, lines = assemble([away, good])
    assert state.step == 20 and "could not be read" in lines[0]
    assert len(committed(away)) == 2  # nothing is set aside


@pytest.mark.usefixtures("one_rank")
def test_a_target_that_is_away_is_waited_for_if_no_other_copy_is_good(
    away_and_good: tuple[Away, LocalStore],
) -> None:
    """The older step, which is good in the other target, would lose ten steps."""
    away, good = away_and_good
    small.damage(good, small.file_of(good, 20), at=-5)
    num_reads = 0

    def come_back() -> None:
        nonlocal num_reads
        num_reads += 1
        away.is_away = num_reads < 8  # the first try ends sooner

    away.on_read = come_back
    found, notes, _ = load([away, good])
    assert found == small.state_at(20)
    assert len(notes) == 1 and f"{good.url}/{folder_name(20, 1)} is set aside" in notes[0]


def test_a_chosen_step_is_read_from_a_target_that_answers(
    away_and_good: tuple[Away, LocalStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which step is the newest is known only when all targets have answered; a chosen step needs one."""
    away, good = away_and_good

    class Silent(Away):
        def list(self, prefix: str = "") -> list[str]:
            self._wait()
            return super().list(prefix)

    silent = Silent(Path(away.url), Patience(0.5, lambda line: None))
    assert assemble([silent, good], 10)[0].step == 10
    with pytest.raises(StorageLost, match="no answer in time"):
        assemble([silent, good])


@pytest.mark.usefixtures("one_rank")
def test_no_older_step_of_another_target_is_loaded_while_the_newest_one_cannot_be_read(tmp_path: Path) -> None:
    """The other target has no copy of step 20; its step 10 would lose ten steps that may be there in a minute."""
    targets = [Unreadable(tmp_path / "a"), open_store(str(tmp_path / "b"))]
    small.save([open_store(targets[0].url)], 20)
    small.save(targets[1:], 10)
    with pytest.raises(StoreError, match=f"{folder_name(20, 1)}.*failed 30 times"):
        load(targets)
    assert [len(committed(store)) for store in targets] == [1, 1]  # nothing is set aside


def test_assembled_weights_are_the_saved_ones(target: Store, tmp_path: Path) -> None:
    for step in (10, 20):
        small.save([target], step, world_size=3)
    small.damage(target, f"{folder_name(20, 1)}/{MANIFEST}", at=-5)
    state, weights, _, notes = assemble([target])
    assert state == small.state_at(10, world_size=3)
    assert "does not match" in notes[0] or "canonical form" in notes[0] or "not valid JSON" in notes[0]
    for name, shape in small.SHAPES.items():
        assert torch.equal(weights[name], small.content(10)[name]["master"].view(shape))


def test_assemble_of_a_step_takes_that_step_or_fails(target: Store, tmp_path: Path) -> None:
    for step in (10, 20):
        small.save([target], step)
    state, weights, *_ = assemble([target], 10)
    assert state.step == 10
    name, shape = next(iter(small.SHAPES.items()))
    assert torch.equal(weights[name], small.content(10)[name]["master"].view(shape))
    with pytest.raises(UserError, match=r"there is none of step 15; .* `electra-dist checkpoint list \S+` shows"):
        assemble([target], 15)


def test_assemble_without_a_checkpoint_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is none yet"):
        assemble([open_store(str(tmp_path))])


def test_read_range_on_s3_returns_the_requested_bytes(open_s3: Callable[[str], Store]) -> None:
    store = open_s3("ranges")
    store.write("x", bytes(range(200)))
    assert store.read_range("x", 10, 5) == bytes(range(10, 15))
