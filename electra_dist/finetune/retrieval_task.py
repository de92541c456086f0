"""Implement retrieval, learnt from pairs of texts that belong together, as a fine-tuning task.

A text becomes a vector: the mean of the encoder's last states over all of its tokens, [CLS] and [SEP] included, scaled
to length 1. Of each pair in a batch, the first text is to be closer to its own second text than to those of the other
pairs ("in-batch negatives"): the loss is the cross-entropy of 20 times the cosines. Second texts that belong to the
same first text, or are equal to its own, count as no negatives.

Guarantee: sentence-transformers loads the written folder and computes equal vectors. For the score, each different
first text of the development pairs is a query, and all different second texts of these pairs are the documents. The
metrics are means over the queries: nDCG@10, the shares of a query's documents among the first and the first ten, and,
to compare, the nDCG@10 of BM25 on the same files.

Limits: a larger batch has more negatives and learns better, but all of it is in memory at once. The pairs that are
held out where there is no development table are those of whole queries.

Source: Henderson et al., arXiv:1705.00652; Reimers and Gurevych, EMNLP 2019 (the scale is that of their library).
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from electra_dist.errors import UserError
from electra_dist.finetune.labelled_texts import Texts, find_split, held_out_rows, texts_of
from electra_dist.finetune.task import Task, TaskOutcome, TextFile, tsv_file
from electra_dist.finetune.text_task import encode_texts, row_outputs
from electra_dist.tables import TABLE_SUFFIXES, Table, read_table

if TYPE_CHECKING:
    from electra_dist.finetune.finetune_config import FinetuneConfig
    from electra_dist.finetune.models import PairModel, TaskModel
    from electra_dist.finetune.training_loop import Examples, Ids, Progress
    from electra_dist.pretrained.encoder import Pretrained

PAIRS = "pairs"
DEPTH = 10  # documents of a ranking that are scored
_TITLES_OF_QUERIES = ("query", "question", "anchor", "sentence1", "text_a")
_TITLES_OF_DOCUMENTS = ("positive", "document", "passage", "answer", "sentence2", "text_b")


class RetrievalTask(Task):
    """Retrieval of the second texts of pairs by their first texts."""

    def __init__(
        self,
        data: Path,
        text_a: str | None = None,
        text_b: str | None = None,
        dev: Path | None = None,
        delimiter: str | None = None,
        dev_share: float = 0.1,
        split_seed: int = 0,
    ) -> None:
        """Read the table of pairs `data`, or the tables train and dev in this folder.

        `text_a` and `text_b` name the columns; None finds them. Without a development table, the pairs of a share of
        the first texts are held out.
        """
        self.name = PAIRS
        self.metric = f"ndcg{DEPTH}"
        self.notes = []
        file = find_split(data, "train")
        if file is None:
            raise UserError(
                f"{data}: no table of pairs; name a {', '.join(TABLE_SUFFIXES)} file with --data, or a folder with "
                f"train{TABLE_SUFFIXES[0]} and so on"
            )
        table = read_table(file, delimiter)
        columns = _find_columns(table, text_a, text_b)
        self.train = _pairs_of(table, *columns)
        digested = f"{self.train.sha256} {columns}"
        dev = dev or find_split(data, "dev")
        split: dict[str, Any] | None = None
        if dev is not None:
            self.dev = _pairs_of(read_table(dev, delimiter), *columns)
            digested += self.dev.sha256
        else:
            self.train, self.dev = _split_off(self.train, dev_share, split_seed)
            split = {"dev_share": dev_share, "split_seed": split_seed, "dev_lines": self.dev.line}
            digested += f", {dev_share} held out by the seed {split_seed}"
            self.notes.append(
                f"{file}: no development file, so {len(self.dev.a)} of {len(self.train.a) + len(self.dev.a)} pairs "
                f"are held out (--dev-share {dev_share}, --split-seed {split_seed}); finetune.json has their lines"
            )
        self.digest = hashlib.sha256(digested.encode()).hexdigest()
        self.data = {"columns": dict(zip(("text_a", "text_b"), columns, strict=True)), "split": split}
        for texts in (self.train, self.dev):
            if texts is self.train or split is None:
                self.notes += texts.remarks()

        self.queries = list(dict.fromkeys(self.dev.a))
        self.documents = list(dict.fromkeys(_second(self.dev)))
        number_of = {document: number for number, document in enumerate(self.documents)}
        relevant: dict[str, set[int]] = defaultdict(set)
        for query, document in zip(self.dev.a, _second(self.dev), strict=True):
            relevant[query].add(number_of[document])
        self.relevant = [relevant[query] for query in self.queries]  # numbers of the documents of each query

    @override
    def check(self, settings: FinetuneConfig) -> None:
        super().check(settings)
        if settings.batch < 2:
            raise UserError(f"--set batch={settings.batch}: {PAIRS} compares the pairs of a batch; give at least 2")

    def examples(self, encoder: Pretrained, settings: FinetuneConfig) -> Examples:
        """Return the pairs, each as the ids of both texts one after another.

        The targets of a pair, int64 [N, 3], are the number of ids of its first text, and a number for each of both
        texts, which is the same for equal texts.
        """
        import torch

        from electra_dist.finetune.training_loop import Examples

        first = self._encode(self.train.a, encoder, settings)
        second = self._encode(_second(self.train), encoder, settings)
        numbers: dict[str, int] = {}
        target_N3 = [
            (len(ids), numbers.setdefault(a, len(numbers)), numbers.setdefault(b, len(numbers)))
            for ids, a, b in zip(first, self.train.a, _second(self.train), strict=True)
        ]
        ids = [[*a, *b] for a, b in zip(first, second, strict=True)]
        return Examples(ids=ids, target_NK=torch.tensor(target_N3))

    @staticmethod
    def _encode(texts: Sequence[str], encoder: Pretrained, settings: FinetuneConfig) -> Ids:
        return encode_texts(texts, None, encoder.tokenizer, encoder.special, settings.max_length)

    @override
    def model(self, encoder: Pretrained, settings: FinetuneConfig, seed: int) -> PairModel:
        from electra_dist.finetune.models import PairModel, StockNetwork

        return PairModel(StockNetwork(encoder, "Model", {}, settings, seed), encoder.special)

    def evaluate(
        self, model: TaskModel, encoder: Pretrained, settings: FinetuneConfig, progress: Progress
    ) -> TaskOutcome:
        """Rank the documents for each query; `progress` starts again with the documents."""
        from electra_dist.finetune.task_metrics import bm25_scores, retrieval_metrics

        query_QH = self._vectors(self.queries, model, encoder, settings, progress)
        document_DH = self._vectors(self.documents, model, encoder, settings, progress)
        rankings = [_best_documents(document_DH @ query_H) for query_H in query_QH]
        metrics = retrieval_metrics(rankings, self.relevant, DEPTH)
        of_bm25 = [_best_documents(scores) for scores in bm25_scores(self.queries, self.documents)]
        metrics[f"bm25_ndcg{DEPTH}"] = retrieval_metrics(of_bm25, self.relevant, DEPTH)[self.metric]
        is_constant = len(document_DH) > 1 and float(np.ptp(document_DH, axis=0).max()) < 1e-6
        failures = ("all texts have the same vector",) if is_constant else ()
        lines = [[str(number), " ".join(map(str, ranking))] for number, ranking in enumerate(rankings)]
        table = tsv_file("dev_rankings.tsv", ("query", "documents"), lines)
        return TaskOutcome(metrics=metrics, failures=failures, predictions=(table,))

    def _vectors(
        self,
        texts: Sequence[str],
        model: TaskModel,
        encoder: Pretrained,
        settings: FinetuneConfig,
        progress: Progress,
    ) -> np.ndarray:
        """Return the vectors of texts, fp32 [N, H] in their order."""
        ids = self._encode(texts, encoder, settings)
        return row_outputs(model, ids, encoder.tower.hidden_size, settings.batch, progress)

    @override
    def model_files(self, encoder: Pretrained, settings: FinetuneConfig) -> tuple[TextFile, ...]:
        modules = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
        pooling = {
            "word_embedding_dimension": encoder.tower.hidden_size,
            "pooling_mode_cls_token": False,
            "pooling_mode_mean_tokens": True,
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
        }
        return (
            _json_file(
                "modules.json",
                [
                    {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
                    for number, (name, path) in enumerate(modules)
                ],
            ),
            _json_file("sentence_bert_config.json", {"max_seq_length": settings.max_length, "do_lower_case": False}),
            _json_file("config_sentence_transformers.json", {"similarity_fn_name": "cosine"}),
            _json_file("1_Pooling/config.json", pooling),
            _json_file("2_Normalize/config.json", {}),
        )


def _json_file(name: str, content: Any) -> TextFile:
    return TextFile(name=name, text=json.dumps(content, indent=2) + "\n")


def _best_documents(scores_D: np.ndarray) -> list[int]:
    """Return the numbers of the documents with the highest scores, best first; of equal ones the first."""
    best: list[int] = np.argsort(-scores_D, kind="stable")[:DEPTH].tolist()
    return best


def _second(texts: Texts) -> list[str]:
    assert texts.b is not None
    return texts.b


def _find_columns(table: Table, text_a: str | None, text_b: str | None) -> tuple[str, str]:
    """Return the columns of both texts; of a table with two columns these, otherwise those of usual titles."""
    free = [column for column in table.columns if column not in (text_a, text_b)]
    if text_a is None and text_b is None and len(free) == 2:
        return free[0], free[1]

    def find(titles: Sequence[str], option: str) -> str:
        found = [column for column in free if column.lower() in titles]
        if len(found) != 1:
            raise UserError(
                f"{table.file}: which columns the pairs are in is not clear; name two of {', '.join(table.columns)} "
                f"with --text-a and --text-b ({option} is not found)"
            )
        return found[0]

    return text_a or find(_TITLES_OF_QUERIES, "--text-a"), text_b or find(_TITLES_OF_DOCUMENTS, "--text-b")


def _pairs_of(table: Table, text_a: str, text_b: str) -> Texts:
    texts = texts_of(table, text_a, text_b, label=text_a)
    for line, *pair in zip(texts.line, texts.a, _second(texts), strict=True):
        if not all(text.strip() for text in pair):
            raise UserError(f"{table.file}:{line}: a text of the pair is empty; write it, or remove the line")
    return texts


def _split_off(texts: Texts, share: float, seed: int) -> tuple[Texts, Texts]:
    """Return (training, development) pairs; all pairs of one first text are in the same part."""
    queries = list(dict.fromkeys(texts.a))
    held_out = {queries[row] for row in held_out_rows(texts.file, [0.0] * len(queries), share, seed)}
    in_dev = [row for row, query in enumerate(texts.a) if query in held_out]
    return texts.rows(sorted(set(range(len(texts.a))) - set(in_dev))), texts.rows(in_dev)
