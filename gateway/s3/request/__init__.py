"""One request: authorization, its body in, its content out."""
