"""Keep the requests of a save and the size of a manifest small when a run has hundreds of ranks."""
