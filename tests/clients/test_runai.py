"""runai-model-streamer: safetensors files from S3 into memory, by many ranges at once."""

from __future__ import annotations

from tests.clients.declared import Client, works
from tests.clients.gateway import Gateway

CLIENT = Client(
    "runai-model-streamer",
    "runai-model-streamer",
    lacks=(
        "put",
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
    also="safetensors in parallel ranges",
)


@works("get", "ranges", "list")
def test_safetensors_files_are_streamed(gateway: Gateway) -> None:
    gateway.python(
        "runai-model-streamer",
        """
        import os
        import fsspec, torch
        from safetensors.torch import save
        lake = fsspec.filesystem("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
        model = {f"layer.{number}": torch.rand(1024, 700) for number in range(12)}
        names = sorted(model)
        for part in range(2):
            content = save({name: model[name] for name in names[part::2]})
            lake.pipe(f"of-runai-model-streamer/m/model-{part}.safetensors", content)
        found = {name: tensor.clone() for name, tensor in tensors("s3://of-runai-model-streamer/m")}
        assert sorted(found) == names
        assert all(torch.equal(found[name], tensor) for name, tensor in model.items())
        """,
    )
