"""Watch one rank: heartbeat, GPU readings, requests to stop or save, and errors that another rank met."""
