"""Read batches of rows from the shards of a corpus; a batch depends only on the step, the seed and the corpus."""
