"""Analyses of the records of a run, such as its goodput, its hangs and the rows it used, of scores, and of corpora."""
