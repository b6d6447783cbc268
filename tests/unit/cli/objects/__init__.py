"""Tests of the commands on names, run in this process on a store that stays open."""
