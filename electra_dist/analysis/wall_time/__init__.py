"""Account for the wall-clock time of a run: its starts, the waits in the queue, and its goodput."""
