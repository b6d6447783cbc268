"""Hugging Face data sets, through fsspec."""

from __future__ import annotations

from tests.clients.declared import Client, works
from tests.clients.gateway import Gateway

CLIENT = Client(
    "datasets",
    "datasets",
    lacks=(
        "ranges",
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
    also="saved, loaded, streamed from Parquet",
)


@works("put", "get", "list")
def test_a_data_set_is_saved_loaded_and_streamed(gateway: Gateway) -> None:
    gateway.python(
        "datasets",
        """
        rows = datasets.Dataset.from_dict({"n": list(range(5000)), "text": [f"row {n}" for n in range(5000)]})
        rows.save_to_disk("s3://of-datasets/saved", storage_options=storage_options)
        assert datasets.load_from_disk("s3://of-datasets/saved", storage_options=storage_options)["n"] == rows["n"]
        rows.to_parquet("s3://of-datasets/rows.parquet", storage_options=storage_options)
        streamed = datasets.load_dataset("parquet", data_files="s3://of-datasets/rows.parquet", streaming=True,
            split="train", storage_options=storage_options)
        assert [row["n"] for row in streamed.take(3)] == [0, 1, 2]
        """,
    )
