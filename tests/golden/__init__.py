"""The golden set: kinds of entries, how they are made, and their records."""
