"""The cluster's rules as models in small: every state of them is looked at, and every weakened rule is noticed."""
