"""Direct reads: chunks read without a request to the engine, through the shared index."""
