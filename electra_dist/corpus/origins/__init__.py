"""Side files of a corpus: which documents are in each row, how they are written and searched."""
