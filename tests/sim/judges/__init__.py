"""Models and observers that compare every answer of a simulated store with what was promised."""
