"""Saving: equal bytes in every target, staging files, buffers, and a target that cannot be written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import checkpoints as small

from electra_dist.checkpoint.background_writer import CheckpointWriter
from electra_dist.checkpoint.checkpoint_manifest import folder_name
from electra_dist.checkpoint.file_reader import verify
from electra_dist.checkpoint.restore_state import assemble
from electra_dist.errors import StoreError
from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store


def test_staged_files_of_dead_attempts_are_removed_and_those_of_the_current_attempt_are_kept(
    open_s3: Callable[[str], Store], tmp_path: Path
) -> None:
    target, staging = open_s3("run"), tmp_path / "staging"
    for attempt in (1, 2):
        (staging / folder_name(10, attempt)).mkdir(parents=True)
        (staging / folder_name(10, attempt) / "rank-00003.safetensors").write_bytes(b"x")
    CheckpointWriter([target], staging, 0, 2, small.KEEP_ALL)
    assert [path.name for path in staging.iterdir()] == [folder_name(10, 2)]
    small.save([target], staging, 20, attempt=2)
    assert [path.name for path in staging.iterdir()] == [
        folder_name(10, 2)
    ]  # an uploaded file is removed from staging


def test_every_target_gets_the_same_bytes(two_targets: list[Store], tmp_path: Path) -> None:
    state = small.save(two_targets, tmp_path / "staging", 10)
    first, second = ({key: target.read(key) for key in target.list()} for target in two_targets)
    assert first == second and len(first) == state.world_size + 1


def test_saving_to_a_target_that_cannot_be_written_raises_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="file"):
        small.save([open_store(str(tmp_path / "file"))], tmp_path / "staging", 10)


def test_save_stores_the_values_at_the_time_of_the_call_and_reuses_the_reserved_buffer(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    writer = CheckpointWriter([store], tmp_path / "staging", 0, 1, small.KEEP_ALL)
    values = small.content(1)
    fragments = small.share(values, 0, 1)
    writer.reserve(fragments)
    buffer = writer._buffer
    for step in (1, 2):
        for name, kinds in small.content(step).items():
            for kind, tensor in kinds.items():
                values[name][kind].copy_(tensor)
        writer.save(small.state_at(step, world_size=1), fragments)
    for kinds in values.values():  # training changes the values while they are written
        for tensor in kinds.values():
            tensor.zero_()
    assert writer._buffer is buffer
    writer.close()
    assert writer._buffer is None
    for step in (1, 2):
        assert verify(store, folder_name(step, 1))[1] == []
    weights = assemble([store])[1]
    assert all((weights[name].view(-1) == small.content(2)[name]["master"]).all() for name in small.SHAPES)
