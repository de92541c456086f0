"""Plans of a corpus: hours, bytes and machines, from rates measured on a sample of its text."""
