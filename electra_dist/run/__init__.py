"""The files of a run folder, and what is written to them: identity, metrics, ledger, log, heartbeats, strikes."""
