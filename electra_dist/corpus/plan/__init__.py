"""Plan the build of a corpus: hours, bytes and machines, predicted from rates measured on a sample of its text."""
