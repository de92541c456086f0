"""Ways in which a comparison scores an encoder, each of which is a column of its table."""
