"""Read and write objects in a local folder or under s3://bucket/prefix through one interface."""
