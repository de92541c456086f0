"""Write and search the origin files of a corpus, which name the documents in each of its rows."""
