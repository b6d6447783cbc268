"""The gateway: S3 and the admin port over HTTP.  It holds no storage logic and imports no engine."""
