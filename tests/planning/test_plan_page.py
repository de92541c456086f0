"""The printed plan: its text against a golden file, epochs, warnings and errors, and its tables on a terminal."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from electra_dist.config import Config
from electra_dist.config.load import load_config
from electra_dist.data.manifest import CorpusManifest
from electra_dist.errors import UserError
from electra_dist.planning.plan import make_plan
from electra_dist.planning.plan_page import print_plan

CONFIGS = Path(__file__).parents[2] / "configs"
GOLDEN = Path(__file__).parent / "golden"
SPECIAL = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}


def plan_text(config: Config, corpus: CorpusManifest | None = None) -> str:
    """Return what `print_plan` prints to a file or a pipe, without the last newline."""
    stream = io.StringIO()
    print_plan(make_plan(config, corpus), stream)
    return stream.getvalue().rstrip("\n")


def large_config(*overrides: str) -> Config:
    """Return the config of ELECTRA-Large: 400,000 steps of 2048 rows of 512 tokens."""
    return load_config(CONFIGS / "large_25pct_mask.yaml", overrides)


def corpus_of_four_shards() -> CorpusManifest:
    """Return the manifest of a corpus of four equal shards, with 4,000 rows and 2,000,000 tokens in all."""
    shard = {"rows": 1000, "tokens": 500_000, "bytes": 1_024_000, "sha256": "0" * 64}
    return CorpusManifest.model_validate(
        {
            "seq_len": 512,
            "dtype": "uint16",
            "tokenizer": {"sha256": "1" * 64, "vocab_size": 30522, "lowercase": True, "special": SPECIAL},
            "shards": [{"name": f"{i}.tar", **shard} for i in range(4)],
        }
    )


def test_the_plan_of_electra_large_equals_the_golden_file():
    golden_text = (GOLDEN / "plan_large_25pct_mask.txt").read_text()

    assert plan_text(large_config()) + "\n" == golden_text


def test_plan_for_a_gpu_without_bf16_names_the_precision_to_set_and_in_fp16_it_is_as_in_bf16():
    in_bf16 = plan_text(large_config("plan.gpu=V100"))
    assert "plan.gpu V100 has no bf16, so it cannot run this config; set train.precision: fp16" in in_bf16
    in_fp16 = plan_text(large_config("plan.gpu=V100", "train.precision=fp16", "engine.zero_stage=2"))
    assert "has no bf16" not in in_fp16
    assert "8 x V100 of 125 TFLOP/s" in in_fp16
    with_bf16 = plan_text(large_config("plan.gpu=A100", "engine.zero_stage=2"))
    micro_batches = [[line for line in text.splitlines() if " GB  " in line] for text in (in_fp16, with_bf16)]
    assert micro_batches[0] == micro_batches[1] != []


def test_with_a_corpus_the_plan_has_the_number_of_epochs():
    """10 steps of 2048 rows read a corpus of 4,000 rows 5.12 times."""
    lines = plan_text(large_config("train.num_steps=10"), corpus_of_four_shards()).splitlines()

    [epochs_line] = [line for line in lines if "epochs" in line]
    assert epochs_line.split(maxsplit=2) == [
        "epochs",
        "5.12",
        "s3://electra-corpus/33b-512: 4,000 rows, 2,000,000 tokens in 4 shards",
    ]


def test_fp32_and_gpu_counts_that_do_not_fit_are_noted_and_an_unknown_gpu_is_an_error():
    assert "no time is predicted in fp32" in plan_text(large_config("train.precision=fp32"))
    assert "plan.num_gpus 7 is not one of them" in plan_text(large_config("plan.num_gpus=7"))
    with pytest.raises(
        UserError, match=r"plan\.gpu: no dense bf16 peak is known for 'TPUv3'; set plan.gpu to one of .*H200"
    ):
        plan_text(large_config("plan.gpu=TPUv3"))


class TerminalStream(io.StringIO):
    """Stream that claims to be a terminal, for which the plan is printed as tables."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_tables_with_the_cells_of_the_plain_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "120")
    plain = io.StringIO()
    terminal = TerminalStream()

    print_plan(make_plan(large_config()), plain)
    print_plan(make_plan(large_config()), terminal)

    assert plain.getvalue() == plan_text(large_config()) + "\n"
    for cell in ("335.14 M", "2.169 GFLOP", "2P + 6P + 4P/W + 8P/W", "638.6"):
        assert cell in plain.getvalue()
        assert cell in terminal.getvalue()


@pytest.mark.real_start
def test_the_plan_does_not_import_torch():
    """Commands without training answer in a fraction of a second on a login node; importing torch takes seconds."""
    code = "import sys, electra_dist.planning.plan_page; sys.exit('torch' in sys.modules)"

    finished = subprocess.run([sys.executable, "-c", code], check=False)

    assert finished.returncode == 0
