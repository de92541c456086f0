"""Find the rows of a corpus that hold texts, a source or a document, and the steps of a run that use these rows."""
