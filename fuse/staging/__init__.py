"""What was written and is not stored yet: staged, committed at close, restored after a crash."""
