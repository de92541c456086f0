"""All mistakes that `mutants.py` makes, in the order of the tables."""

from __future__ import annotations

from mutant_tables.kernels import KERNELS
from mutant_tables.launching import LAUNCHING
from mutant_tables.results import RESULTS
from mutant_tables.storage import STORAGE
from mutant_tables.text_and_records import TEXT_AND_RECORDS
from mutant_tables.training import TRAINING

MUTANTS = (*STORAGE, *TEXT_AND_RECORDS, *TRAINING, *KERNELS, *RESULTS, *LAUNCHING)
