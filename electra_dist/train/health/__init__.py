"""Watch one rank: heartbeat, GPU readings, requests to stop or save, and user's errors of other ranks."""
