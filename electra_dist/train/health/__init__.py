"""Whether this rank is well, and what it must do: heartbeat, GPU, stop requests, errors of other ranks."""
