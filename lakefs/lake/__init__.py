"""The object service as steps: one method for each operation of a client, and multipart uploads."""
