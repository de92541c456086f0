"""Objectives at equal training FLOPs on one corpus: runs, evaluations along the way, one table and one picture."""
