"""The blocking client: link, engine, driver, `Lake`.  Imports no trio."""
