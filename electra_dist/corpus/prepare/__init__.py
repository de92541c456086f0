"""Clean text before it becomes a corpus: extraction, filters and deduplication by datatrove."""
