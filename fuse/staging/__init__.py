"""Written bytes that are not stored yet: staged in files, committed at close, restored after a crash."""
