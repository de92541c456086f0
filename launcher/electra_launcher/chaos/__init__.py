"""A drill that kills, stops and damages a run on purpose, and compares it with an uninterrupted one."""
