"""Benchmarks: the product's cost, beside the plain tool that does the same.

`python -m bench.run` runs scenarios, prints a table and writes JSON; `python -m bench.demo` shows the product on a
real model.
"""
