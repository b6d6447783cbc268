"""safetensors files, through fsspec."""

from __future__ import annotations

from tests.clients.declared import Client, works
from tests.clients.gateway import Gateway

CLIENT = Client(
    "safetensors",
    "safetensors",
    lacks=(
        "list",
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
    also="single tensors by their ranges",
)


@works("put", "get", "ranges")
def test_a_model_is_stored_loaded_and_read_by_tensor(gateway: Gateway) -> None:
    gateway.python(
        "safetensors",
        """
        import json, numpy
        tensors = {f"layer.{number}": numpy.random.rand(512, 1024).astype("f4") for number in range(6)}
        lake.pipe("of-safetensors/model.safetensors", save(tensors))
        loaded = load(lake.cat("of-safetensors/model.safetensors"))
        assert all((loaded[name] == tensor).all() for name, tensor in tensors.items())
        with lake.open("of-safetensors/model.safetensors", "rb", cache_type="none") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            begin, end = json.loads(file.read(header_bytes))["layer.3"]["data_offsets"]
            file.seek(8 + header_bytes + begin)
            assert file.read(end - begin) == tensors["layer.3"].tobytes()
        """,
    )
