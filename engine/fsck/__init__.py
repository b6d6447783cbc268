"""Checks of a store and its repair: check (open store), survey, repair, rebuild (closed), and reports of damage."""
