"""Find the rows of a corpus that hold a text, a source or a document, and the steps of a run that use these rows."""
