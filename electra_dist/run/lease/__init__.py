"""The lease of a run folder: the lock that lets only one start of a run at a time train in it."""
