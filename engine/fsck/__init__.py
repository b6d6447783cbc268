"""Whether the store holds together, and what can be mended: check (open), survey, repair, rebuild (closed),
and reports of damage.
"""
