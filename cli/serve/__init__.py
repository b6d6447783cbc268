"""serve and gateway: processes put together."""
