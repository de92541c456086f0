"""A comparison with minimal pairs of files, a treebank, probes at every layer, context AUC and a criterion."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from electra_dist.compare import checkpoint_scores, comparison, comparison_runs
from electra_dist.compare.comparison import Comparison
from electra_dist.compare.comparison_config import CompareConfig
from electra_dist.compare.comparison_runs import PlannedRun
from electra_dist.config.load import load_section
from electra_dist.errors import UserError
from electra_dist.pretrained.encoder import Pretrained, load_pretrained
from electra_dist.pretrained.hf import TowerName
from electra_dist.scoring import word_probes


def fake_pretrain(run: PlannedRun, ranks: int, pause: object) -> str:
    """Make the folder of a run, without training."""
    Path(run.config.run_dir).mkdir(parents=True, exist_ok=True)
    return ""


def load_initial_weights(spec: str, tower: TowerName = "discriminator", step: int | None = None) -> Pretrained:
    """Return the initial weights of a run in place of its checkpoint."""
    return load_pretrained(spec if step is None else f"random:{spec}.yaml", tower)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Minimal pairs on the corpus' numbered words, and a treebank whose tags follow from the words."""
    pairs = tmp_path / "pairs" / "order"
    pairs.mkdir(parents=True)
    (pairs / "first.txt").write_text("".join(f"w{n + 1} w{n}\nw{n} w{n + 1}\n" for n in range(20)))
    (pairs / "second.txt").write_text("".join(f"w{n} w1 w{n + 1}\nw{n} w2 w{n + 1}\n" for n in range(20)))
    for split, first in (("train", 0), ("test", 5)):
        lines = []
        for number in range(first, first + 20):
            lines.append(
                f"1\tw{number % 7}\t_\tA\t_\t_\t2\t_\t_\t_\n2\tw{10 + number % 5}\t_\tB\t_\t_\t0\t_\t_\t_\n\n"
            )
        (tmp_path / "pairs" / f"made-{split}.conllu").write_text("".join(lines))
    return tmp_path / "pairs"


@pytest.mark.sample
def test_all_measures_are_scored_paired_and_judged(
    make_comparison: Callable[..., Path], words_task: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(word_probes, "_MIN_STEPS", 100)  # enough for two tags
    monkeypatch.setattr(comparison_runs, "pretrain", fake_pretrain)
    monkeypatch.setattr(comparison, "saved_steps", lambda run: set(run.marks))
    monkeypatch.setattr(checkpoint_scores, "load_pretrained", load_initial_weights)
    criterion = {"statement": "Tags are better.", "arm": "rtd", "baseline": "mlm", "metrics": ["tags", "order"]}
    file = make_comparison(
        seeds=[1, 2],
        evaluate_at=[1.0],
        minimal_pairs=[str(data / "order")],
        minimal_pairs_per_kind=10,
        criterion=criterion,
        detection=True,
        tasks={
            "tags": {"how": "tags", "data": str(data)},
            "heads": {"how": "heads", "data": str(data)},
            "words": {"data": str(words_task), "text_a": "text", "label": "answer", "set": {"max_length": 16}},
        },
    )
    made = Comparison(load_section(file, CompareConfig), file, None)

    assert made.run(lambda *_: None, lambda _: None)

    tree = json.loads((tmp_path / "out" / "compare.json").read_text())
    score_of = {(score["entry"], score["seed"], score["task"]): score for score in tree["scores"]}
    order = score_of["rtd", 1, "order"]
    assert set(order["details"]) == {"first", "second"}
    assert order["score"] == pytest.approx(sum(order["details"].values()) / 2)  # as many pairs of each kind
    assert order["standard_error"] > 0 or order["score"] in (0.0, 1.0)
    for task in ("tags", "heads", "words"):
        probed = score_of["mlm", 2, task]
        assert probed["score"] == probed["details"][f"layer {probed['layer']}"]
        assert len(probed["details"]) == 3  # the embeddings and two layers
    assert score_of["rtd", 1, "tags"]["score"] == 1.0
    for entry in ("rtd", "mlm"):
        assert 0.3 < score_of[entry, 2, "context-auc"]["score"] < 0.7  # of random weights
    differences = {(difference["entry"], difference["task"]): difference for difference in tree["differences"]}
    assert differences["rtd", "tags"]["num_seeds"] == 2
    assert differences["rtd", "context-auc"]["num_seeds"] == 2
    assert tree["verdict"]["answer"] == "not met"
    page = (tmp_path / "out" / "compare.md").read_text()
    assert "* Criterion: Tags are better." in page
    assert "before the first score." in page
    assert "| minus mlm | heads | tags | words | order | context-auc | detection (minus rtd) |" in page
    mlm_row = next(line for line in page.splitlines() if line.startswith("| mlm |"))
    *_, of_context, of_detection, average = mlm_row.strip("| ").split(" | ")
    assert of_context != "-"
    assert (of_detection, average != "-") == ("-", True)  # mlm has no discriminator; the average needs none
    assert {entry for entry, _, task in score_of if task == "detection"} == {"random", "rtd"}
    assert "objectives without both have no score (-)" in page
    pairs = page[page.index("| objective | pairs | margin | accuracy_token | accuracy_word |") :].split("\n\n")[0]
    rows = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[2:] for line in pairs.splitlines()[2:]}
    assert list(rows) == ["random initialisation", "trigram model", "rtd", "mlm"]
    assert rows["rtd"][1:] == ["-", "-"]  # the readouts of words are those of a masked language model
    scores_of_mlm = [score_of["mlm", seed, "order"] for seed in (1, 2)]
    for place, key in enumerate(["margin", "accuracy_token", "accuracy_word"]):
        mean = sum(score["metrics"][key] for score in scores_of_mlm) / 2
        assert rows["mlm"][place] == f"{mean:.3f}"


def test_missing_data_are_named_with_their_key(make_comparison: Callable[..., Path], data: Path) -> None:
    no_folder = make_comparison(tasks={"tags": {"how": "tags"}})
    with pytest.raises(UserError, match=r"tasks\.tags: `how: tags` needs a treebank; set `data`"):
        Comparison(load_section(no_folder, CompareConfig), no_folder, None)
    no_pairs = make_comparison(minimal_pairs=[str(data / "missing.txt")])
    with pytest.raises(UserError, match=r"minimal_pairs: .*missing.txt: no such file"):
        Comparison(load_section(no_pairs, CompareConfig), no_pairs, None)
