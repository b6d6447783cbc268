"""One request: authorization, receiving its body, sending its content."""
