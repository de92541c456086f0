"""`electra-dist checkpoint`: list, verify, diff and repair on folders, run folders and S3."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from electra_launcher.cli.main import app
from support import checkpoints as small
from support import s3_server
from support.checkpoints import checkpoint_in, committed, folder_name, verify
from support.hostile_text import HOSTILE, assert_shown
from typer.testing import CliRunner, Result

from electra_dist.checkpoint.commit import begin_attempt
from electra_dist.checkpoint.manifest import MANIFEST
from electra_dist.checkpoint.stored_copies import SET_ASIDE, set_all_aside
from electra_dist.config.load import dump_yaml, load_config
from electra_dist.errors import UserError
from electra_dist.run.folder import run_identity
from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store

RUN = {"identity_sha256": "0" * 64, "corpus_fingerprint": "corpus"}
FILE = small.file_name(1)  # of an unfinished save


def call(*arguments: str, code: int = 0) -> str:
    """Run a command and return its output; raise its UserError, and fail if it ends with another exit code."""
    result: Result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["checkpoint", *arguments])
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def run(
    tiny_config: Callable[..., Path], two_targets: list[Store], s3: s3_server.S3Server, tmp_path: Path
) -> tuple[str, list[Store]]:
    """A run folder whose config names a local target and one on S3, and the two targets, with three checkpoints."""
    settings = {"checkpoint.targets": [t.url for t in two_targets], "checkpoint.endpoint_url": s3.endpoint_url}
    config = load_config(tiny_config(**settings))
    folder = tmp_path / "a-run"
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_yaml(config))
    begin_attempt(two_targets, RUN)
    for step in (10, 20, 30):
        small.save(two_targets, step)
    return str(folder), two_targets


def test_list_shows_every_state_in_every_target(run: tuple[str, list[Store]]) -> None:
    path, targets = run
    checkpoint_in(targets[0], folder_name(20, 1)).set_aside("its file rusted")
    small.damage(targets[1], f"{folder_name(30, 1)}/{MANIFEST}")
    targets[0].write(f"{folder_name(40, 1)}/{FILE}", b"x")
    text = call("list", path)
    near, far = text.split(targets[1].url)
    assert [word in near for word in ("set aside its file rusted", "leftover", "committed", "160")] == [True] * 4
    assert "damaged manifest.json" in far and far.count("committed") == 2


def test_list_verify_and_diff_print_json_for_other_programs(run: tuple[str, list[Store]]) -> None:
    path, targets = run
    checkpoint_in(targets[0], folder_name(10, 1)).set_aside("its file rusted")
    small.damage(targets[1], small.file_of(targets[1], 20))

    def tree(*arguments: str, code: int) -> Any:
        result = CliRunner().invoke(app, ["checkpoint", *arguments, "--json"])
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)

    near, far = tree("list", path, code=0)
    assert [near["target"], far["target"]] == [target.url for target in targets]
    assert [(c["step"], c["status"], c["ranks"]) for c in near["checkpoints"]] == [
        (10, "set aside", None),
        (20, "committed", 2),
        (30, "committed", 2),
    ]
    verified = tree("verify", path, code=1)
    bad = [checkpoint["url"] for checkpoint in verified["checkpoints"] if checkpoint["faults"]]
    assert (verified["good"], bad) == (4, [f"{targets[1].url}/{folder_name(20, 1)}"])
    left, right = (f"{targets[0].url}/{folder_name(step, 1)}" for step in (20, 30))
    difference = tree("diff", left, right, code=1)
    assert not difference["equal"] and {"field": "step", "a": 20, "b": 30} in difference["state"]
    assert difference["parameters"][0]["largest"].keys() == {"master", "exp_avg", "exp_avg_sq"}
    assert tree("diff", left, left, code=0)["equal"]


def test_list_of_an_empty_folder_prints_no_checkpoints(tmp_path: Path) -> None:
    assert "no checkpoints" in call("list", str(tmp_path))


def test_verify_reads_every_checkpoint_and_names_the_damaged_one(run: tuple[str, list[Store]]) -> None:
    path, targets = run
    assert "6 of 6 checkpoints are good" in call("verify", path)
    small.damage(targets[1], small.file_of(targets[1], 20))
    text = call("verify", path, code=1)
    assert f"BAD  {targets[1].url}/{folder_name(20, 1)}" in text and "does not match its digest" in text
    assert "5 of 6 checkpoints are good" in text and f"repair {path}" in text
    assert "2 of 2 checkpoints are good" in call("verify", path, "--step", "30")


def test_path_without_checkpoints_is_a_user_error(tmp_path: Path) -> None:
    for arguments in (["list", str(tmp_path / "nowhere")], ["verify", str(tmp_path)], ["diff", str(tmp_path), "x"]):
        with pytest.raises(UserError):
            call(*arguments)


def test_diff_finds_checkpoints_of_different_world_sizes_equal(tmp_path: Path) -> None:
    for name, world_size in (("a", 2), ("b", 3)):
        small.save([open_store(str(tmp_path / name))], 10, world_size=world_size)
    text = call("diff", str(tmp_path / "a" / folder_name(10, 1)), str(tmp_path / "b"))
    assert "equal bit for bit: 4 parameters, weights and both moments" in text
    assert "world_size" in text  # the only field in which the run states differ
    assert "rows_seen" not in text


def test_diff_prints_the_largest_difference_of_each_parameter(tmp_path: Path) -> None:
    for name, run_number in (("a", 0), ("b", 5)):
        small.save([open_store(str(tmp_path / name))], 10, run=run_number)
    text = call("diff", str(tmp_path / "a"), str(tmp_path / "b"), code=1)
    a, b = small.content(10), small.content(10, run=5)
    for name in small.SHAPES:
        row = next(line for line in text.splitlines() if name in line)
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            assert f"{float((a[name][kind] - b[name][kind]).abs().max()):.3e}" in row  # type: ignore[index]
    assert "different: 4 of 4 parameters" in text


def test_diff_of_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    small.save([store], 10)
    small.damage(store, small.file_of(store, 10))
    with pytest.raises(UserError, match="does not match its digest"):
        call("diff", str(tmp_path), str(tmp_path))


def test_repair_restores_every_kind_of_damage_from_the_other_target(run: tuple[str, list[Store]]) -> None:
    path, (near, far) = run
    good = {key: near.read(key) for key in near.list("step-")}
    small.damage(near, small.file_of(near, 10))
    small.damage(far, f"{folder_name(20, 1)}/{MANIFEST}")
    near.delete(small.file_of(near, 30))
    checkpoint_in(near, folder_name(30, 1)).set_aside("a load found it so")
    near.write(f"{folder_name(5, 0)}/{FILE}", b"of a dead attempt")
    changed = {store: store.list() for store in (near, far)}
    plan = call("repair", path, "--dry-run")
    assert {store: store.list() for store in (near, far)} == changed and "a dry run" in plan
    text = call("repair", path)
    assert text.splitlines() == plan.splitlines()[:-1]
    for key, source in (("10-a0001/rank-00001.", far), (f"20-a0001/{MANIFEST}", near), (f"30-a0001/{MANIFEST}", far)):
        assert any(key in line and f"restored from {source.url}" in line for line in text.splitlines())
    for store in (near, far):
        assert {key: store.read(key) for key in store.list("step-")} == good
    assert "nothing to do" in call("repair", path)


def test_repair_sets_aside_a_checkpoint_that_is_damaged_in_all_targets(run: tuple[str, list[Store]]) -> None:
    path, targets = run
    for store in targets:
        small.damage(store, small.file_of(store, 30))
    assert call("repair", path).count("set aside, no other target has a good copy") == 2
    for store in targets:
        assert [step for step, _, _ in committed(store)] == [10, 20]
        assert store.exists(f"{folder_name(30, 1)}/{SET_ASIDE}")


def test_repair_restores_from_a_folder_given_by_the_option_from(tmp_path: Path) -> None:
    damaged, source = open_store(str(tmp_path / "damaged")), open_store(str(tmp_path / "source"))
    small.save([damaged, source], 10)
    small.damage(damaged, small.file_of(damaged, 10))
    assert "restored from" in call("repair", damaged.url, "--from", source.url)
    assert verify(damaged, folder_name(10, 1))[1] == []


def test_repair_does_not_touch_a_checkpoint_that_the_newest_attempt_is_writing(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    begin_attempt([store], RUN)
    begin_attempt([store], RUN)
    store.write(f"{folder_name(10, 2)}/{FILE}", b"half")
    store.write(f"{folder_name(10, 1)}/{FILE}", b"half")
    text = call("repair", str(tmp_path))
    assert folder_name(10, 1) in text and folder_name(10, 2) not in text
    assert store.list("step-") == [f"{folder_name(10, 2)}/{FILE}"]


def test_repair_copies_nothing_from_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    """Step and start are equal, as they usually are; each way to know the own run is enough."""
    own, other = open_store(str(tmp_path / "own")), open_store(str(tmp_path / "other"))
    small.save([own], 10)
    small.save([other], 10, run=1, fields={"identity_sha256": "1" * 64})
    for damaged_file in (small.file_of(own, 10), f"{folder_name(10, 1)}/{MANIFEST}"):
        small.damage(own, damaged_file)
        before = {key: own.read(key) for key in own.list()}
        with pytest.raises(UserError, match=r"is no copy of .* another config .* nothing was changed") as refusal:
            call("repair", own.url, "--from", other.url)
        assert "\n" not in str(refusal.value)
        assert {key: own.read(key) for key in own.list()} == before
        begin_attempt([own], RUN)  # says which run it is when the manifest is damaged, too
    other_corpus = open_store(str(tmp_path / "other-corpus"))
    small.save([other_corpus], 10, run=1, fields={"corpus_fingerprint": "other"})
    with pytest.raises(UserError, match="another corpus"):
        call("repair", own.url, "--from", other_corpus.url)


def test_repair_takes_only_an_exact_copy_of_a_checkpoint_of_the_same_run(tmp_path: Path) -> None:
    """Another save of the same run, step and start, as of a run that was begun again in a new folder, is no copy."""
    own, other = open_store(str(tmp_path / "own")), open_store(str(tmp_path / "other"))
    small.save([own], 10)
    small.save([other], 10, run=1)
    small.damage(own, small.file_of(own, 10))
    tensors = own.read(small.file_of(own, 10))
    assert "no other target has a good copy" in call("repair", own.url, "--from", other.url)
    assert own.read(small.file_of(own, 10)) == tensors


def test_repair_does_not_restore_what_was_given_up_when_the_run_began_again(tmp_path: Path) -> None:
    target, backup = open_store(str(tmp_path / "target")), open_store(str(tmp_path / "backup"))
    begin_attempt([target], RUN)
    for step in (10, 20, 30):
        small.save([target, backup], step)
    checkpoint_in(target, folder_name(10, 1)).set_aside("a load found it so")
    small.damage(target, small.file_of(target, 30))
    set_all_aside([target])
    keys = target.list()
    assert "nothing to do" in call("repair", target.url, "--from", backup.url)
    assert target.list() == keys and committed(target) == []


def test_a_run_folder_whose_checkpoints_another_run_has_written_is_refused(
    tiny_config: Callable[..., Path], tmp_path: Path
) -> None:
    config = load_config(tiny_config())
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_yaml(config))
    (folder / "identity.json").write_text(json.dumps(run_identity(config, "corpus")))
    store = open_store(str(folder / "checkpoints"))
    small.save([store], 10, fields={"identity_sha256": config.identity_sha256()})
    older = {"identity_sha256": config.identity_sha256(1)}
    small.save([store], 20, fields=older)
    assert "2 of 2 checkpoints are good" in call("verify", str(folder))
    small.save([store], 30, fields={"identity_sha256": "1" * 64})
    keys = store.list()
    assert "of another run a run with another config" in " ".join(call("list", str(folder)).split())
    for arguments in (["verify", str(folder)], ["repair", str(folder)], ["diff", str(folder), str(folder)]):
        with pytest.raises(UserError, match="step 30 is not of this run: a run with another config") as refusal:
            call(*arguments)
        assert "\n" not in str(refusal.value)
    assert store.list() == keys


def test_the_reason_of_another_why_a_checkpoint_is_set_aside_is_shown_escaped(run: tuple[str, list[Store]]) -> None:
    path, targets = run
    checkpoint_in(targets[0], folder_name(20, 1)).set_aside(HOSTILE)
    assert_shown(call("list", path))
