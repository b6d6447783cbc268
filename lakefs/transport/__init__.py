"""How frames travel: Unix and TCP streams on trio."""
