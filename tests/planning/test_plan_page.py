"""The printed plan: its text against a golden file, epochs, warnings and errors, and its tables on a terminal."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from electra_launcher.cli.main import app
from typer.testing import CliRunner

from electra_dist.config import Config
from electra_dist.config.load import load_config
from electra_dist.data.manifest import CorpusManifest, write_manifest
from electra_dist.errors import UserError
from electra_dist.planning.plan import make_plan
from electra_dist.planning.plan_page import print_plan
from electra_dist.store.open_store import open_store

CONFIGS = Path(__file__).parents[2] / "configs"
GOLDEN = Path(__file__).parent / "golden"
SPECIAL = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}


def plan_text(config: Config) -> str:
    """Return what `print_plan` prints to a file or a pipe, without the last newline."""
    stream = io.StringIO()
    print_plan(make_plan(config), stream)
    return stream.getvalue().rstrip("\n")


def large_config(*overrides: str) -> Config:
    """Return the config of ELECTRA-Large: 400,000 steps of 2048 rows of 512 tokens."""
    return load_config(CONFIGS / "large_25pct_mask.yaml", overrides)


@pytest.fixture
def corpus_of_four_shards(tmp_path: Path) -> Path:
    """Return a folder with corpus.json of four equal shards, with 4,000 rows and 2,000,000 tokens in all."""
    shard = {"rows": 1000, "tokens": 500_000, "bytes": 1_024_000, "sha256": "0" * 64}
    manifest = CorpusManifest.model_validate(
        {
            "seq_len": 512,
            "dtype": "uint16",
            "tokenizer": {"sha256": "1" * 64, "vocab_size": 30522, "lowercase": True, "special": SPECIAL},
            "shards": [{"name": f"{i}.tar", **shard} for i in range(4)],
        }
    )
    write_manifest(open_store(str(tmp_path)), manifest)
    return tmp_path


def test_the_plan_of_electra_large_equals_the_golden_file():
    golden_text = (GOLDEN / "plan_large_25pct_mask.txt").read_text()

    assert plan_text(large_config()) + "\n" == golden_text


def test_plan_for_a_gpu_without_bf16_names_the_precision_to_set_and_in_fp16_it_is_as_in_bf16():
    in_bf16 = plan_text(large_config("plan.gpu=V100"))
    assert "plan.gpu V100 has no bf16, so it cannot run this config; set train.precision: fp16" in in_bf16
    plain = ("engine.zero_stage=2", "engine.overlap_communication=false")
    in_fp16 = plan_text(large_config(*plain, "plan.gpu=V100", "train.precision=fp16"))
    assert "has no bf16" not in in_fp16
    assert "8 x V100 of 125 TFLOP/s" in in_fp16
    with_bf16 = plan_text(large_config(*plain, "plan.gpu=A100"))
    micro_batches = [[line for line in text.splitlines() if " GB  " in line] for text in (in_fp16, with_bf16)]
    assert micro_batches[0] == micro_batches[1] != []


def test_a_corpus_that_exists_gives_the_number_of_epochs(corpus_of_four_shards: Path):
    """10 steps of 2048 rows read a corpus of 4,000 rows 5.12 times."""
    config = large_config("train.num_steps=10", f"data.corpus={corpus_of_four_shards}", "data.heldout=null")

    [epochs_line] = [line for line in plan_text(config).splitlines() if "epochs" in line]

    assert epochs_line.split(maxsplit=2) == [
        "epochs",
        "5.12",
        f"{corpus_of_four_shards}: 4,000 rows, 2,000,000 tokens",
    ]
    assert make_plan(config).as_json()["epochs"] == pytest.approx(5.12)
    missing = large_config(f"data.corpus={corpus_of_four_shards}/none", "data.heldout=null")
    assert "none does not exist yet" in plan_text(missing)


def test_each_corpus_of_the_phases_gives_its_number_of_epochs(corpus_of_four_shards: Path):
    phases = f"data.phases=[{{from_step: 8, corpus: {corpus_of_four_shards}}}]"
    config = large_config("train.num_steps=10", "data.heldout=null", phases)

    text = plan_text(config)

    assert f"in 4,096 rows, 1.02 epochs; {corpus_of_four_shards}: 4,000 rows" in text
    assert "in 16,384 rows; s3://electra-corpus/33b-512 is remote and was not read" in text


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ("data.seq_len=128", "has rows of 512 tokens, but data.seq_len is 128"),
        ("model.vocab_size=8000", "30522 entries"),
    ],
)
def test_a_corpus_with_other_rows_or_another_vocabulary_is_refused_as_in_training(
    corpus_of_four_shards: Path, change: str, fault: str
):
    config = large_config(f"data.corpus={corpus_of_four_shards}", "data.heldout=null", change)

    with pytest.raises(UserError, match=fault):
        make_plan(config)


def test_fp32_and_gpu_counts_that_do_not_fit_are_noted_and_an_unknown_gpu_is_an_error():
    in_fp32 = plan_text(large_config("train.precision=fp32", "engine.overlap_communication=false"))
    assert "no time is predicted in fp32" in in_fp32 and "electra-dist speed CONFIG" in in_fp32
    on_seven = plan_text(large_config("plan.num_gpus=7"))
    assert "plan.num_gpus 7 cannot share 2,048 rows evenly, so 4 are planned" in on_seven
    assert "4 x H100" in on_seven and "W = 4 GPUs" in on_seven
    with pytest.raises(
        UserError, match=r"plan\.gpu: no dense bf16 peak is known for 'TPUv3'; set plan.gpu .*to one of .*H200"
    ):
        plan_text(large_config("plan.gpu=TPUv3"))


def plan_command(*arguments: str) -> str:
    """Return what `electra-dist plan` prints for ELECTRA-Large; a UserError is raised."""
    result = CliRunner().invoke(app, ["plan", str(CONFIGS / "large_25pct_mask.yaml"), *arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_the_gpu_of_the_command_is_obeyed_without_nodes_and_is_that_of_the_config_without_an_option():
    assert "8 x A100 of 312 TFLOP/s" in plan_command("--gpu", "A100")
    assert "Scaling on L40S" not in plan_command("--gpu", "L40S")
    with_nodes = plan_command("--nodes", "2")
    assert "Scaling on H100" in with_nodes and "16 x H100" in with_nodes


def test_options_of_a_node_stand_for_one_node_where_nodes_is_missing():
    priced = plan_command("--gpu-hour-price", "2", "--set", "plan.num_gpus=4")
    assert "Scaling on H100" in priced and "cost" in priced and "W = 4 GPUs" in priced
    assert "2 x H200" in plan_command("--gpu", "H200", "--gpus-per-node", "2")


@pytest.mark.parametrize("arguments", [(), ("--nodes", "1"), ("--nodes", "1", "--step-tokens-per-s", "1e5")])
def test_an_unknown_gpu_of_the_command_is_refused_with_the_known_ones(arguments: tuple[str, ...]):
    with pytest.raises(UserError, match=r"TPUv3.*--gpu.* one of .*A100, "):
        plan_command("--gpu", "TPUv3", *arguments)


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
