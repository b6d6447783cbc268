"""A native layer between kernel and libfuse: threads that answer reads and appends, and answers that libfuse lacks."""
