"""The files of configs/paper: their FLOPs are those that the paper prints, and the commands in them make its grids."""

from __future__ import annotations

import io
import re
import subprocess
from pathlib import Path

import pytest

from electra_dist.config import Config
from electra_dist.config.load import load_config
from electra_dist.planning.plan import make_plan
from electra_dist.planning.plan_page import print_plan
from electra_dist.planning.training_days import run_flops_by_paper

CONFIGS = Path(__file__).parents[2] / "configs"
PAPER = CONFIGS / "paper"
PRINTED = {  # training FLOPs of Tables 1 and 2
    "paper/electra_small.yaml": "1.4e18",
    "paper/electra_small_50pct.yaml": "7.1e17",
    "paper/electra_small_25pct.yaml": "3.6e17",
    "paper/electra_small_12pct.yaml": "1.8e17",
    "paper/electra_small_6pct.yaml": "8.9e16",
    "paper/bert_small.yaml": "1.4e18",
    "paper/bert_base.yaml": "6.4e19",
    "base_size.yaml": "6.4e19",
    "paper/bert_large.yaml": "7.1e20",
    "large_25pct_mask.yaml": "7.1e20",
    "paper/electra_large_1_75m.yaml": "3.1e21",
}
WITHOUT_PRINTED_FLOPS = {
    "generator_sizes.yaml",
    "model_sizes.yaml",
    "tuning_base.yaml",
    "tuning_small.yaml",
    "weight_tying.yaml",
}
GLUE_OF_PARTLY_TRAINED = {"50pct": "79.0", "25pct": "77.7", "12pct": "76.0", "6pct": "74.1"}


def flops_of_dry_run(config: Config) -> str:
    """Return the FLOPs by the paper's count that `--dry-run` prints, in the paper's two digits, as in 1.4e18."""
    output = io.StringIO()
    print_plan(make_plan(config), output)
    (figure,) = re.findall(r"paper's count\s+(\S+) FLOP", output.getvalue())
    return f"{float(figure):.1e}".replace("e+", "e")


@pytest.mark.parametrize("name", PRINTED)
def test_the_dry_run_prints_the_flops_of_the_papers_table(name: str) -> None:
    config = load_config(CONFIGS / name)
    exact = run_flops_by_paper(config)
    assert exact is not None
    assert f"{exact:.1e}".replace("e+", "e") == PRINTED[name]
    # The plan's three digits round once more, which for one figure (3.56e17) must still give the paper's two.
    assert flops_of_dry_run(config) == PRINTED[name]


def test_every_file_is_compared_with_the_paper_or_is_known_to_have_no_printed_flops() -> None:
    files = {path.name for path in PAPER.glob("*.yaml")}
    compared = {Path(name).name for name in PRINTED if name.startswith("paper/")}
    assert files == compared | WITHOUT_PRINTED_FLOPS
    listed = (PAPER / "README.md").read_text()
    for name in PRINTED:
        short = Path(name).stem.removeprefix("electra_small")
        assert short in listed and PRINTED[name] in listed


def runs_of(name: str) -> dict[str, Config]:
    """Return the configs of all runs of a file by their folders: its own, and those of the commands in its comment.

    The commands are run by bash, with a `deepspeed` that prints its arguments.
    """
    comment = [line for line in (PAPER / name).read_text().splitlines() if line.startswith("#   ")]
    script = "deepspeed() { printf '%s\\t' \"$@\"; echo; }\n" + "\n".join(
        line.removeprefix("#   ") for line in comment
    )
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    configs = [load_config(PAPER / name)]
    for line in done.stdout.splitlines():
        program, option, file, *settings = line.rstrip("\t").split("\t")
        assert (program, option, file) == ("launcher/pretrain.py", "--config", f"configs/paper/{name}")
        assert set(settings[::2]) == {"--set"}
        configs.append(load_config(PAPER / name, settings[1::2]))
    by_folder = {config.run_dir: config for config in configs}
    assert len(by_folder) == len(configs), "two runs in one folder"
    return by_folder


def test_the_grid_of_generators_has_the_papers_sizes_and_only_they_differ() -> None:
    runs = runs_of("generator_sizes.yaml")
    assert len(runs) == 12
    for folder, config in runs.items():
        _, width, generator = Path(folder).name.split("_")
        model = config.model
        assert config.train.num_steps == 500_000
        assert model.discriminator.hidden_size == model.embedding_size == int(width)
        assert model.discriminator.num_layers == model.generator.num_layers == 12
        assert model.discriminator.intermediate_size == 4 * int(width)
        if generator == "unigram":
            assert config.objective.generator == "unigram"
            continue
        assert (model.generator.hidden_size, model.generator.num_heads) == (int(generator), int(generator) // 64)
        assert model.generator.intermediate_size == 4 * int(generator)
    # "If both are the same size, training takes around twice as much compute as masked language modelling alone."
    same_size = run_flops_by_paper(runs["runs/paper/generator_768_768"])
    mlm = run_flops_by_paper(load_config(PAPER / "generator_sizes.yaml", ["objective.name=mlm"]))
    assert same_size is not None and mlm is not None
    assert same_size / mlm == pytest.approx(2, abs=0.1)


def test_electra_and_bert_of_each_width_cost_the_same_by_the_papers_count() -> None:
    runs = runs_of("model_sizes.yaml")
    assert len(runs) == 10
    for width in (128, 256, 384, 512, 768):
        electra, bert = (runs[f"runs/paper/size_{name}_{width}"] for name in ("electra", "bert"))
        assert bert.objective.name == "mlm"
        assert electra.model.discriminator == bert.model.discriminator
        assert electra.model.generator.hidden_size == width // 2
        flops_of_electra, flops_of_bert = run_flops_by_paper(electra), run_flops_by_paper(bert)
        assert flops_of_electra is not None and flops_of_bert is not None
        assert flops_of_bert / flops_of_electra == pytest.approx(1, abs=5e-4)  # half of 1,000 steps


def test_the_grids_of_the_appendix_and_the_kinds_of_tying_are_the_papers() -> None:
    small, base = list(runs_of("tuning_small.yaml").values()), list(runs_of("tuning_base.yaml").values())
    assert sorted({run.objective.rtd_weight for run in small}) == [1, 10, 20, 50, 100]
    assert sorted({run.optimizer.lr for run in small}) == [1e-4, 2e-4, 3e-4, 5e-4]
    assert sorted({run.optimizer.lr for run in base}) == [1e-4, 2e-4, 3e-4, 5e-4]
    tying = list(runs_of("weight_tying.yaml").values())
    assert {run.model.sharing for run in tying} == {"none", "embeddings", "all"}
    assert all(run.model.generator == run.model.discriminator for run in tying)


def test_partly_trained_files_state_the_papers_scores() -> None:
    for name, score in GLUE_OF_PARTLY_TRAINED.items():
        assert f"GLUE {score};" in (PAPER / f"electra_small_{name}.yaml").read_text()


@pytest.mark.parametrize(
    "setting",
    ["objective.name=electric", "objective.discriminator_mlm_weight=1", "objective.name=adversarial"],
)
def test_runs_that_the_papers_method_does_not_cover_have_no_such_figure(setting: str) -> None:
    assert run_flops_by_paper(load_config(CONFIGS / "small.yaml", [setting])) is None
