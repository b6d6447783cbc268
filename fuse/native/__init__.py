"""A native layer between kernel and libfuse: threads that answer reads, and answers for which libfuse has no words."""
