"""The coordinator of a lake: a few keys on which all its processes agree, and what a lake keeps there."""
