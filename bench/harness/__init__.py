"""What every scenario is run with: sides in turn, load, processes, CPU accounts, plots."""
