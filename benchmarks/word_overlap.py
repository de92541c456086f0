"""Measures how much of STS-B follows from the words that two sentences share, without any model.

    python benchmarks/word_overlap.py GLUE

The prediction is the Jaccard index: words of both sentences over words of either one, in lower case. docs/results.md
compares it with probes of pretrained encoders.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import numpy as np

from electra_dist.finetune.task_metrics import regression_metrics
from electra_dist.finetune.texts.text_specs import GLUE
from electra_dist.finetune.texts.text_task import TextTask


def overlap(first: str, second: str) -> float:
    """Return the Jaccard index of the sets of words of two texts, from 0 to 1; 0 if neither has a word."""
    first_words = set(re.findall(r"\w+", first.lower()))
    second_words = set(re.findall(r"\w+", second.lower()))
    return len(first_words & second_words) / max(1, len(first_words | second_words))


def correlation(glue: Path) -> float:
    """Return Spearman's correlation of the overlap with the labels of STS-B's development set.

    Args:
        glue: folder of the GLUE download, which has STS-B/ in it.

    Raises:
        UserError: the files of STS-B are missing or not valid.
    """
    task = TextTask(GLUE["stsb"], glue)
    texts = task.dev[""]
    assert texts.b is not None  # STS-B has pairs
    predicted_N = np.array([overlap(first, second) for first, second in zip(texts.a, texts.b, strict=True)])
    return regression_metrics(predicted_N, task.dev_target[""][:, 0].numpy())["spearman"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("glue", type=Path, help="folder of the GLUE download")
    print(f"Spearman {correlation(parser.parse_args().glue):.4f}")
