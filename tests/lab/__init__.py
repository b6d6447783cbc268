"""Tests that need hardware which this machine lacks: they run in the guest of `lab/`."""
