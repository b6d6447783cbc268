"""Names that only S3 clients, and other programs that speak the native protocol, can make."""

from __future__ import annotations

from lakefs.client.blocking.lake import Lake
from lakefs.client.facade import driver_of
from lakefs.put.upload import only_result
from lakefs.steps.steps import send
from lakefs.wire.messages import NO_CONDITION, NameChange, ObjectAttributes, PutObjects


def put_odd(lake: Lake, bucket: str, key: str, content: bytes) -> None:
    """Store an object under any key, as the gateway does."""
    change = NameChange(bucket, key, b"", ObjectAttributes(), NO_CONDITION, create_bucket=True)
    only_result(driver_of(lake).run(send(PutObjects([len(content)], [change]), body=[memoryview(content)])))
