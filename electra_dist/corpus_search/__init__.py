"""Search of a corpus for a text, a source or a document, and of the steps of a run that use what was found."""
