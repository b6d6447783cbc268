"""Multipart uploads: begun, given parts, completed, aborted, expired."""
