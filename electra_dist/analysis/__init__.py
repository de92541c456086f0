"""Pure functions that analyze the records of a run: goodput, run state, hangs, stragglers, and the rows it used."""
