"""Commands that move trees: sync, diff and import, between folders, the lake, other lakes and S3."""
