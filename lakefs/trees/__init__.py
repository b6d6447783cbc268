"""Folders of local files, in and out."""
