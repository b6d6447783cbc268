"""The MLflow plug-in: artifact URIs `lake://BUCKET/KEY`, by the entry point that MLflow looks for."""
