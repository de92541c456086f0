"""Compare objectives at equal training FLOPs on one corpus: make runs and scores, a table and a picture."""
