"""The S3 door: what operations answered is taught to native code, which repeats it."""
