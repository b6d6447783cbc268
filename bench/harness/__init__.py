"""Parts shared by all scenarios: sides in turn, load, processes, CPU accounts, plots."""
