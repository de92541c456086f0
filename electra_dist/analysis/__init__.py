"""Computed from what a run recorded, and pure: goodput, run state, hangs, stragglers, the audit of rows."""
