"""ELECTRA pretraining at scale: what is trained and how a run remembers itself. DESIGN: README.md and docs/."""

__version__ = "0.1.0"
