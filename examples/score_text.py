"""Show which words of a text a discriminator takes for replaced, and which of several sentences it prefers.

    python examples/score_text.py MODEL "the chef ate the meal" "the chef eight the meal"

MODEL is the folder of a run, or of a Hugging Face ELECTRA discriminator. The same from the command line, for a file
with one sentence on each line: `electra-dist score FILE --model MODEL --tokens`.
"""

from __future__ import annotations

import argparse

import electra_dist as ed


def main() -> None:
    """Print each token with its probability of being replaced, then the sentence with the highest score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a run or of a Hugging Face model")
    parser.add_argument("texts", nargs="+")
    arguments = parser.parse_args()

    model = ed.load(arguments.model, tower="discriminator")
    for tokens in ed.replaced_probability(model, arguments.texts):
        print("  ".join(f"{token} {probability:.2f}" for token, probability in tokens))

    scores = ed.score_texts(model, arguments.texts)
    best = max(scores, key=lambda text: text.score)
    print(f"best: {best.text} ({best.score:.3f})")


if __name__ == "__main__":
    main()
