"""A drill that hits a run with faults and compares it with an uninterrupted one."""
