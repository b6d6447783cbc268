"""s3torchconnector: data sets, checkpoints and distributed checkpoints of torch."""

from __future__ import annotations

from tests.clients.declared import Client, works
from tests.clients.gateway import Gateway

CLIENT = Client(
    "s3torchconnector",
    "s3torchconnector",
    lacks=("buckets", "metadata", "conditions", "presigned", "virtual host"),
    also="data sets, checkpoints, `torch.distributed.checkpoint`",
)


@works("put", "get", "ranges", "list", "multipart", "checksums")
def test_a_model_is_checkpointed_and_a_data_set_is_read(gateway: Gateway) -> None:
    gateway.python(
        "s3torchconnector",
        """
        import torch
        from s3torchconnector import S3ReaderConstructor
        model = torch.nn.Linear(1500, 3000).state_dict()
        with checkpoint.writer("s3://of-s3torchconnector/one.pt") as writer:
            torch.save(model, writer)
        with checkpoint.reader("s3://of-s3torchconnector/one.pt") as reader:
            loaded = torch.load(reader)
        assert torch.equal(loaded["weight"], model["weight"])
        for number in range(5):
            with checkpoint.writer(f"s3://of-s3torchconnector/set/{number}") as writer:
                writer.write(bytes([number]) * 1000)
        samples = S3MapDataset.from_prefix("s3://of-s3torchconnector/set/", **lake)
        assert [samples[number].read() for number in range(5)] == [bytes([number]) * 1000 for number in range(5)]
        stream = S3IterableDataset.from_prefix("s3://of-s3torchconnector/set/", **lake, transform=lambda one: one.key)
        assert list(torch.utils.data.DataLoader(stream, batch_size=None, num_workers=2)).count("set/3") >= 1
        ranged = S3MapDataset.from_prefix("s3://of-s3torchconnector/one", **lake,
            reader_constructor=S3ReaderConstructor.range_based(buffer_size=1 << 20))
        with checkpoint.reader("s3://of-s3torchconnector/one.pt") as reader:
            content = reader.read()
        reader = ranged[0]
        reader.seek(4194300)
        assert reader.read(11) == content[4194300:4194311]
        """,
    )


@works("delete", "copy")
def test_a_distributed_checkpoint_is_saved_and_loaded(gateway: Gateway) -> None:
    gateway.python(
        "s3torchconnector",
        """
        import warnings
        import torch
        import torch.distributed.checkpoint as dcp
        from s3torchconnector.dcp import S3StorageReader, S3StorageWriter
        warnings.simplefilter("ignore")
        place = {"path": "s3://of-s3torchconnector/dcp/one", "region": "us-east-1",
            "s3client_config": S3ClientConfig(force_path_style=True)}
        state = {"a": torch.rand(1000, 2000), "b": torch.rand(10)}
        for _ in range(2):
            dcp.save(state, storage_writer=S3StorageWriter(**place, overwrite=True))
        back = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        dcp.load(back, storage_reader=S3StorageReader(**place))
        assert all(torch.equal(back[name], tensor) for name, tensor in state.items())
        """,
    )
