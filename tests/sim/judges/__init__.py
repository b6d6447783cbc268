"""Models and observers that hold every answer of a simulated store against what was promised."""
