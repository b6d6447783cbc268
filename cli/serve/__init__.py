"""serve and gateway: the processes, put together."""
