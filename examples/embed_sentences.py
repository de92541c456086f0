"""Turn sentences into vectors with a pretrained discriminator, and print how similar they are.

    python examples/embed_sentences.py MODEL "the chef ate the meal" "the cook had dinner"

MODEL is the folder of a run, or of a Hugging Face ELECTRA or ModernBERT. The vector of a sentence is the mean of the
states of its tokens. A model that was not fine-tuned for similarity gives rough values.
"""

from __future__ import annotations

import argparse

import torch

import electra_dist as ed


def embed(model: ed.Pretrained, sentences: list[str]) -> torch.Tensor:
    """Return one vector for each sentence, [sentences, hidden width], of length 1."""
    special = model.special
    rows = [[special.cls, *ids, special.sep] for ids in model.tokenizer.encode(sentences)]
    longest = max(len(row) for row in rows)
    ids_BS = torch.tensor([row + [special.pad] * (longest - len(row)) for row in rows])
    with torch.no_grad():
        states_BSH = model.backbone().eval()(ids_BS)
    is_token_BS1 = (ids_BS != special.pad).unsqueeze(-1)
    means_BH = (states_BSH * is_token_BS1).sum(1) / is_token_BS1.sum(1)
    return torch.nn.functional.normalize(means_BH, dim=-1)


def main() -> None:
    """Print the cosine of the angle between each two sentences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a run or of a Hugging Face model")
    parser.add_argument("sentences", nargs="+")
    arguments = parser.parse_args()

    vectors_BH = embed(ed.load(arguments.model), arguments.sentences)
    for cosines, sentence in zip((vectors_BH @ vectors_BH.T).tolist(), arguments.sentences, strict=True):
        print(" ".join(f"{cosine:6.3f}" for cosine in cosines), sentence)


if __name__ == "__main__":
    main()
