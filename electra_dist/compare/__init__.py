"""Compares objectives at equal training FLOPs on one corpus: makes runs and scores, a table and a picture."""
