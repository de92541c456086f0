"""Online: shards -> batches, as a pure function of the step."""
