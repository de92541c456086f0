"""Steps of datatrove pipelines: reading, extraction, filters, counts of what is dropped, and writing."""
