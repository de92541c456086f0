"""Print the curves of a run as a table, or write them as a CSV file for a spreadsheet, pandas or R.

    python examples/read_curves.py RUN [--kind eval] [--csv FILE]

RUN is the folder of a run, also of one that is still training.
"""

from __future__ import annotations

import argparse
import csv
import sys

import electra_dist as ed

SHOWN = {"train": ["step", "loss", "mlm_loss", "rtd_loss", "lr"], "eval": ["step", "mlm_loss", "auc", "context_auc"]}


def main() -> None:
    """Write all columns to the file, or the most important ones to the screen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder of a run")
    parser.add_argument("--kind", choices=list(SHOWN), default="train", help="logged steps, or held-out evaluations")
    parser.add_argument("--csv", help="file to write")
    arguments = parser.parse_args()

    curves = ed.metrics(arguments.run, arguments.kind)  # with pandas: pandas.DataFrame(curves)
    if arguments.csv:
        with open(arguments.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(curves)
            writer.writerows(zip(*curves.values(), strict=True))
        return
    columns = SHOWN[arguments.kind]
    writer = csv.writer(sys.stdout, delimiter="\t")
    writer.writerow(columns)
    writer.writerows(zip(*(curves[name] for name in columns), strict=True))


if __name__ == "__main__":
    main()
