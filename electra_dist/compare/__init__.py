"""Comparison of objectives at equal training FLOPs on one corpus: runs, scores, one table and one picture."""
