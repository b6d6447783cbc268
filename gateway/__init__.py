"""The gateway: faces over HTTP.  It holds no storage logic and imports no engine."""
