"""The lease of a run folder: a lock by which one start of the run (the first or a restart) at a time trains in it."""
