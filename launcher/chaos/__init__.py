"""A drill: a run hit by faults against an uninterrupted one."""
