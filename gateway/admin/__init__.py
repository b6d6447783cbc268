"""Health, readiness and metrics for monitors."""
