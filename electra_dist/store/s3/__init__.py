"""Objects on S3 behind the interface of a store: requests with retries, downloads that go on, uploads in parts."""
