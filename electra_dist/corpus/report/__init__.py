"""The report of a corpus build, build.json: counts of documents, and the tables that show them."""
