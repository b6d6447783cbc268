"""The fsspec plug-in: `lake://BUCKET/KEY` for pandas, pyarrow, datasets, torch and others that open files by fsspec."""
