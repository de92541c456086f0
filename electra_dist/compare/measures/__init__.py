"""Score an encoder for a comparison in several ways, each of which is a column of its table."""
