"""Analysis of what a run recorded, as pure functions: goodput, run state, hangs, stragglers, the audit of rows."""
