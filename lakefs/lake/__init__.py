"""The object service as steps: one method for each thing a user does; multipart uploads."""
