"""Read and write the files of a run folder: config, identity, metrics, ledger, log, heartbeats and strikes."""
