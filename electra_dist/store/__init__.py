"""Where bytes live: a local folder or s3://bucket/prefix behind one interface."""
