"""Check the campaign of random runs: what it draws, which twin it demands, and a sample of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import yaml
from drills.campaign.cases import EXCHANGED_KEYS, check, draw_case
from drills.campaign.draws import DRAWS, NOT_DRAWN, config_keys, draw_changes, is_left_alone, placed, tree_of
from drills.campaign.trial import Fault, Segment, Side, compare, without_equal_neighbours
from support.real_runs import REPOSITORY

from electra_dist.config.load import load_config

NUM_CASES = 40


def test_every_key_of_the_config_is_drawn_or_left_alone_for_a_stated_reason() -> None:
    keys = list(config_keys())
    assert [key for key in keys if (key in DRAWS) == is_left_alone(key)] == []
    assert set(DRAWS) <= set(keys)
    sections = {key.rpartition(".")[0] for key in keys} | {key.partition(".")[0] for key in keys}
    assert set(NOT_DRAWN) <= {*keys, *sections}
    assert all(NOT_DRAWN.values())


def test_a_case_is_a_function_of_its_seed_and_number() -> None:
    cases = [draw_case(7, number) for number in range(NUM_CASES)]
    assert cases == [draw_case(7, number) for number in range(NUM_CASES)]
    assert len({case.config() for case in cases}) == NUM_CASES
    assert draw_case(8, 0).config() != cases[0].config()


def test_cases_have_all_kinds_of_interruptions_and_ranks_and_settings_that_fit() -> None:
    cases = [draw_case(1, number) for number in range(NUM_CASES)]
    legs = [leg for case in cases for leg in case.legs]
    kinds = {leg.interruption.kind for leg in legs if leg.interruption}
    assert kinds >= {"kill at a change", "kill at a time", "stop file", "save file", "SIGTERM", "SIGINT"}
    assert {leg.ranks for leg in legs} == {1, 2, 3}
    assert any(len({leg.ranks for leg in case.legs}) > 1 for case in cases)
    assert any(case.spikes for case in cases)
    assert any(case.num_refused for case in cases)
    for case in cases:
        assert case.legs[-1].interruption is None
        for leg in case.legs:
            config = check({**case.changes, **leg.settings})
            assert config is not None
            assert config.train.global_batch % leg.ranks == 0
            assert set(leg.settings) <= set(EXCHANGED_KEYS)


def test_a_drawn_config_is_read_from_its_file(tmp_path: Path) -> None:
    case = draw_case(1, 3)
    tree = placed(tree_of(case.changes), {"DATA": tmp_path / "data", "CASE": tmp_path, "SIDE": tmp_path / "side"})
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tree))
    config = load_config(file)
    assert config.run_dir == str(tmp_path / "side" / "run")
    assert config.data.corpus == str(tmp_path / "data" / "corpus")
    assert config.train.num_steps == case.changes["train.num_steps"]


def test_every_key_is_drawn_sooner_or_later() -> None:
    random = Random(5)
    drawn = {key for _ in range(300) for key in draw_changes(random)}
    assert drawn >= set(DRAWS)


def test_a_contradiction_is_refused_by_the_config_check() -> None:
    assert check({"train.num_steps": 9}) is not None
    assert check({"train.num_steps": 9, "optimizer.warmup_steps": 10}) is None
    assert check({"train.num_steps": 9, "train.global_batch": 3, "train.micro_batch": 2}) is None


def test_the_twin_changes_with_the_run_except_between_zero_1_and_2() -> None:
    def segment(step: int, ranks: int, **settings: object) -> Segment:
        return Segment(step, ranks, tuple((key.replace("__", "."), value) for key, value in settings.items()))

    first, second = segment(0, 2, engine__zero_stage=1), segment(3, 2, engine__zero_stage=2)
    third, fourth = segment(6, 2, engine__zero_stage=3), segment(9, 1, engine__zero_stage=3)
    assert without_equal_neighbours([first, second, third, fourth]) == [first, third, fourth]


def test_one_changed_bit_of_a_record_is_a_fault(tmp_path: Path) -> None:
    sides = [Side(tmp_path / name, draw_case(1, 0), tmp_path) for name in ("interrupted", "twin")]
    for side, losses in zip(
        sides, ([0.1 + 0.2, float("nan"), 0.3], [0.1 + 0.2, float("nan"), 0.1 + 0.2]), strict=True
    ):
        side.run_dir.mkdir(parents=True)
        records = [{"step": step, "loss": loss, "step_s": id(side)} for step, loss in enumerate(losses, start=1)]
        (side.run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(Fault, match=r"record 3 \(step 3\): loss 0.3 instead of 0.30000000000000004;"):
        compare(*sides)


@pytest.mark.sample
def test_a_sample_of_the_campaign_finds_no_fault() -> None:
    command = [sys.executable, str(REPOSITORY / "tests" / "drills" / "campaign"), "--seconds", "15", "--seed", "11"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=dict(os.environ))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " 0 faults of 0 sorts; " in done.stdout
