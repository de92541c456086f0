"""Retrieval learnt from pairs: the loss, the scores, a task that BM25 cannot solve, and what other libraries load."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from electra_launcher.cli.main import app
from sklearn.metrics import ndcg_score
from transformers import AutoModel, AutoTokenizer
from typer.testing import CliRunner

from electra_dist.errors import UserError
from electra_dist.finetune.finetune_and_probe import finetune_task
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.open_task import TaskRequest, open_task
from electra_dist.finetune.retrieval_task import RetrievalTask
from electra_dist.finetune.task_metrics import bm25_scores, retrieval_metrics
from electra_dist.model.encoder import DropoutKeys
from electra_dist.pretrained.encoder import Pretrained
from electra_dist.scoring.number_agreement import NOUNS, THINGS

CPU = torch.device("cpu")
SETTINGS = FinetuneConfig(
    lr=3e-3, layer_decay=1.0, epochs=12, batch=32, max_length=24, hidden_dropout=0.0, attention_dropout=0.0
)


def write_pairs(folder: Path, num_train: int = 640, num_dev: int = 60) -> Path:
    """Write pairs of three words and their plurals, in another order: no word of a query is in its document."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    words = [*NOUNS, *THINGS]
    lines = []
    for _ in range(num_train + num_dev):
        chosen = [words[number] for number in rng.choice(len(words), 3, replace=False)]
        lines.append(
            {"query": " ".join(one for one, _ in chosen), "positive": " ".join(many for _, many in chosen[::-1])}
        )
    for name, part in (("train", lines[:num_train]), ("dev", lines[num_train:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in part))
    return folder


@pytest.fixture(scope="module")
def tuned(encoder: Pretrained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that is trained on pairs."""
    folder = tmp_path_factory.mktemp("pairs")
    task = RetrievalTask(write_pairs(folder / "data"))
    result = finetune_task(encoder, task, SETTINGS, 0, CPU, folder=folder / "model")
    assert not result.failures
    assert result.metrics["ndcg10"] > 0.5 > 0.2 > result.metrics["bm25_ndcg10"]
    return folder / "model"


def test_the_loss_finds_each_second_text_among_those_that_do_not_belong_to_the_first(
    encoder: Pretrained, tmp_path: Path
) -> None:
    """The independent truth: cosines of means of states, row by row, and a softmax over the allowed texts."""
    pairs = [("the dog", "dogs"), ("the dog", "many birds"), ("the king", "the old kings saw it"), ("a car", "dogs")]
    (tmp_path / "train.tsv").write_text("a\tb\n" + "".join(f"{a}\t{b}\n" for a, b in pairs))
    (tmp_path / "dev.tsv").write_text("a\tb\nthe dog\tdogs\n")
    task = RetrievalTask(tmp_path)
    model = task.model(encoder, SETTINGS, seed=0).eval()
    examples = task.examples(encoder, SETTINGS)
    longest = max(map(len, examples.ids)) + 3
    ids = torch.tensor([[*row, *[encoder.special.pad] * (longest - len(row))] for row in examples.ids])

    loss = model(ids, examples.target_NK, DropoutKeys.off(ids))

    def vector(text: str) -> torch.Tensor:
        row = [encoder.special.cls, *encoder.tokenizer.encode([text])[0], encoder.special.sep]
        mean = model.network(torch.tensor([row]))[0].mean(0)
        return mean / mean.norm()

    losses = []
    for number, (a, b) in enumerate(pairs):
        others = [d for other, (c, d) in enumerate(pairs) if other != number and c != a and d != b]
        logits = torch.stack([20 * vector(a) @ vector(text) for text in (b, *others)])
        losses.append(-logits.log_softmax(0)[0])
    torch.testing.assert_close(loss, torch.stack(losses).mean(), atol=1e-4, rtol=0)


def test_the_scores_are_those_of_other_definitions() -> None:
    rng = np.random.default_rng(1)
    scores = rng.normal(size=(30, 50))
    relevant = [set(rng.choice(50, rng.integers(1, 15), replace=False).tolist()) for _ in range(30)]
    rankings = [np.argsort(-row).tolist() for row in scores]
    metrics = retrieval_metrics(rankings, relevant, 10)
    truth = np.array([[document in of_query for document in range(50)] for of_query in relevant]).astype(float)
    assert metrics["ndcg10"] == pytest.approx(ndcg_score(truth, scores, k=10))
    recalls = [len(set(ranking[:10]) & of_query) / len(of_query) for ranking, of_query in zip(rankings, relevant)]
    assert metrics["recall10"] == pytest.approx(np.mean(recalls))

    documents = ["The cat sat.", "A dog and a cat", "nothing here at all"]
    [found] = bm25_scores(["cat cat"], documents)
    lengths, mean = [3, 5, 4], 4.0
    idf = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))
    expected = [2 * idf * 2.2 / (1 + 1.2 * (0.25 + 0.75 * length / mean)) for length in lengths]
    assert found.tolist() == pytest.approx([*expected[:2], 0.0])


@torch.no_grad()
def test_transformers_computes_the_vectors_of_the_written_model_and_the_ranking_is_theirs(tuned: Path) -> None:
    dev = [json.loads(line) for line in (tuned.parent / "data" / "dev.jsonl").read_text().splitlines()]
    queries, documents = (list(dict.fromkeys(line[key] for line in dev)) for key in ("query", "positive"))
    model, tokenizer = AutoModel.from_pretrained(tuned).eval(), AutoTokenizer.from_pretrained(tuned)

    def vector(text: str) -> torch.Tensor:
        return torch.nn.functional.normalize(
            model(**tokenizer(text, return_tensors="pt")).last_hidden_state.mean(1)[0], dim=0
        )

    cosines = torch.stack([vector(text) for text in queries]) @ torch.stack([vector(text) for text in documents]).T
    lines = (tuned / "dev_rankings.tsv").read_text().splitlines()[1:]
    best = [int(line.split("\t")[1].split()[0]) for line in lines]
    assert cosines.gather(1, torch.tensor(best)[:, None])[:, 0].tolist() == pytest.approx(
        cosines.amax(1).tolist(), abs=1e-5
    )


def test_sentence_transformers_computes_equal_vectors(tuned: Path, encoder: Pretrained) -> None:
    library = pytest.importorskip("sentence_transformers", reason="the package sentence-transformers is not installed")
    model = library.SentenceTransformer(str(tuned), device="cpu")
    texts = ["the dog", "many old kings saw the birds near a house", "car " * 40]

    vectors = model.encode(texts)

    task = RetrievalTask(tuned.parent / "data")
    ours = task.model(encoder, SETTINGS, seed=0).eval()
    ours.network.model.load_state_dict(AutoModel.from_pretrained(tuned).state_dict())
    for text, vector in zip(texts, vectors, strict=True):
        pieces = encoder.tokenizer.encode([text])[0][: SETTINGS.max_length - 2]
        ids = torch.tensor([[encoder.special.cls, *pieces, encoder.special.sep]])
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(vector), ours.predict(ids)[0], atol=1e-5, rtol=0)
    assert model.similarity_fn_name == "cosine"


def test_a_modern_model_is_trained_on_pairs_too(modern_encoder: Pretrained, tmp_path: Path) -> None:
    task = RetrievalTask(write_pairs(tmp_path / "data", num_train=64, num_dev=8))
    settings = SETTINGS.model_copy(update={"epochs": 1.0})
    result = finetune_task(modern_encoder, task, settings, 0, CPU, folder=tmp_path / "model")
    assert result.metrics["recall10"] == 1.0  # of eight documents
    assert type(AutoModel.from_pretrained(tmp_path / "model")).__name__ == "ModernBertModel"


def test_pairs_are_held_out_by_query_and_wrong_files_and_settings_are_refused(tmp_path: Path) -> None:
    table = tmp_path / "pairs.csv"
    table.write_text("id,question,passage\n" + "".join(f"{n},q {n % 20},p {n}\n" for n in range(100)))
    task = open_task(TaskRequest(name="pairs", data=table, dev_share=0.2))
    assert isinstance(task, RetrievalTask)
    assert len(task.queries) == 4 and len(task.dev.a) == 20 and len(task.train.a) == 80
    assert not set(task.train.a) & set(task.dev.a)
    assert all(len(of_query) == 5 for of_query in task.relevant)
    assert task.data["columns"] == {"text_a": "question", "text_b": "passage"}
    with pytest.raises(UserError, match="give at least 2"):
        task.check(FinetuneConfig(batch=1))

    tabs = tmp_path / "pairs.tsv"
    tabs.write_text("left\tright\n" + "".join(f"q {n}\tp {n}\n" for n in range(20)) + "short\n")
    notes = RetrievalTask(tabs).notes
    assert notes.count(f"{tabs}: 1 lines with too few columns are left out") == 1  # not for each part

    table.write_text("id,left,right\n1,a b,c\n")
    with pytest.raises(UserError, match="name two of id, left, right with --text-a and --text-b"):
        RetrievalTask(table)
    with pytest.raises(UserError, match="too few to hold out"):
        RetrievalTask(table, "left", "right")
    table.write_text("left,right\na b,c\nd, \n")
    with pytest.raises(UserError, match=r"pairs.csv:3: a text of the pair is empty"):
        RetrievalTask(table)
    result = CliRunner().invoke(app, ["finetune", "--model", "m", "--data", str(tmp_path / "no"), "--task", "pairs"])
    assert isinstance(result.exception, UserError) and "no table of pairs" in str(result.exception)
