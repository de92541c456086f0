"""Write and search the side files of a corpus, which name the documents in each of its rows."""
