"""Read and write objects (files, or S3 objects) in a local folder or under s3://bucket/prefix by one interface."""
