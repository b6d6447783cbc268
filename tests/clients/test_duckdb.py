"""DuckDB, through fsspec."""

from __future__ import annotations

from tests.clients.declared import Client, works
from tests.clients.gateway import Gateway

CLIENT = Client(
    "duckdb",
    "duckdb",
    lacks=(
        "delete",
        "buckets",
        "multipart",
        "copy",
        "metadata",
        "checksums",
        "conditions",
        "presigned",
        "virtual host",
    ),
    also="Parquet queried in place",
)


@works("put", "get", "ranges", "list")
def test_tables_are_written_and_queried_in_place(gateway: Gateway) -> None:
    gateway.python(
        "duckdb",
        """
        duckdb.sql("COPY (SELECT range AS n, range % 3 AS part FROM range(100000)) TO 's3://of-duckdb/t/one.parquet'")
        duckdb.sql("COPY (SELECT 7 AS n, 9 AS part) TO 's3://of-duckdb/t/two.parquet'")
        sums = duckdb.sql("SELECT sum(n) FROM 's3://of-duckdb/t/*.parquet' WHERE part = 1")
        assert sums.fetchall() == [(1666616667,)]
        assert duckdb.sql("SELECT count(*) FROM 's3://of-duckdb/t/*.parquet'").fetchall() == [(100001,)]
        """,
    )
