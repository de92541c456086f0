"""Health of a rank and requests to it: heartbeat, GPU readings, requests to stop or save, errors of other ranks."""
