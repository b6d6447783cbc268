"""The other S3 store of `lake import`: its listings, its objects, and errors in the words of the lake.

The one module that imports boto3, which brings credentials, profiles and settings that people have for it already.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol
from xml.etree import ElementTree

from lakefs.errors import (
    BucketNotFound,
    EngineUnreachable,
    InvalidArgument,
    KeyNotFound,
    LakeError,
    PermissionDenied,
    SourceChanged,
)

ATTEMPTS: Final = 5
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""Variables that name a store of one's own, whose host seldom answers to BUCKET.HOST."""
_ORDER: Final = "VersionsAndMarkers"
_DENIED: Final = frozenset(("AccessDenied", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"))
_MISSING: Final = frozenset(("NoSuchKey", "NoSuchVersion", "404"))


@dataclass(frozen=True)
class Found:
    """An object of a listing, or a version of one.  `etag`: without quotes; `version`: its id, "" for the current."""

    key: str
    size_bytes: int
    etag: str
    mtime_ns: int
    version: str = ""
    is_marker: bool = False


class Body(Protocol):
    """The bytes of an object, read once."""

    def read(self, amt: int | None = None, /) -> bytes: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Fetched:
    """An object as it is fetched: the answer's fields, its headers by their names in lower case, and its body."""

    fields: dict[str, Any]
    headers: dict[str, str]
    body: Body


class S3Source:
    """One bucket of another S3 store."""

    def __init__(self, client: Any, bucket: str) -> None:
        self._client = client
        self.bucket = bucket
        client.meta.events.register("before-parse.s3.ListObjectVersions", _note_order)

    def pages(self, prefix: str) -> Iterator[list[Found]]:
        """Yield the objects below a prefix, page by page, in the order of their keys."""
        for page in self._pages("list_objects_v2", prefix):
            yield [_found(each) for each in page.get("Contents", ())]

    def keys_with_versions(self, prefix: str) -> Iterator[list[Found]]:
        """Yield for each key below a prefix its versions and delete markers, the oldest first."""
        versions: list[Found] = []
        for page in self._pages("list_object_versions", prefix):
            left = {False: iter(page.get("Versions", ())), True: iter(page.get("DeleteMarkers", ()))}
            for is_marker in page[_ORDER]:
                found = _found(next(left[is_marker]), is_marker=is_marker)
                if versions and versions[0].key != found.key:
                    yield versions[::-1]
                    versions = []
                versions.append(found)
        if versions:
            yield versions[::-1]

    def _pages(self, operation: str, prefix: str) -> Iterator[dict[str, Any]]:
        pages = iter(self._client.get_paginator(operation).paginate(Bucket=self.bucket, Prefix=prefix))
        while True:
            with self._translated(prefix, is_listing=True):
                page = next(pages, None)
            if page is None:
                return
            yield page

    @contextlib.contextmanager
    def fetched(self, found: Found) -> Iterator[Fetched]:
        """Context manager: an object with its body, which must be as it was listed.  SourceChanged, KeyNotFound."""
        with self._translated(found.key):
            condition = {} if found.version else {"IfMatch": f'"{found.etag}"'}
            answer = self._client.get_object(Bucket=self.bucket, Key=found.key, **condition, **_version(found))
            try:
                yield Fetched(answer, answer["ResponseMetadata"]["HTTPHeaders"], answer["Body"])
            finally:
                answer["Body"].close()

    def tags(self, found: Found) -> dict[str, str]:
        """Return the tags of an object."""
        with self._translated(found.key):
            answer = self._client.get_object_tagging(Bucket=self.bucket, Key=found.key, **_version(found))
        return {tag["Key"]: tag["Value"] for tag in answer["TagSet"]}

    def part_bytes(self, found: Found, count: int) -> int | None:
        """Return the length of the parts of an object that was stored in `count` of them; None if that is not known.

        Known is what the lengths of the first and the last part prove: all others are as long as the first.
        """
        try:
            with self._translated(found.key):
                first, last = (self._part(found, number) for number in (1, count))
        except LakeError:
            return None
        if first.get("PartsCount") != count or last.get("PartsCount") != count:
            return None
        length = int(first["ContentLength"])
        is_proven = length * (count - 1) + int(last["ContentLength"]) == found.size_bytes
        return length if length and is_proven else None

    def _part(self, found: Found, number: int) -> dict[str, Any]:
        answer: dict[str, Any] = self._client.head_object(
            Bucket=self.bucket, Key=found.key, PartNumber=number, **_version(found)
        )
        return answer

    @contextlib.contextmanager
    def _translated(self, subject: str, *, is_listing: bool = False) -> Iterator[None]:
        """Context manager: raise the errors of the other store as errors of the lake."""
        from botocore import exceptions

        shown = f"s3://{self.bucket}/{subject}"
        try:
            yield
        except exceptions.ClientError as error:
            failure = _as_lake_error(error.response, self.bucket, shown)
            if is_listing and isinstance(failure, InvalidArgument):
                raise EngineUnreachable(failure.message, subject=shown) from error
            raise failure from error
        except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError) as error:
            raise PermissionDenied(
                f"{shown}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or give "
                "--anonymous for a public bucket"
            ) from error
        except (exceptions.ParamValidationError, exceptions.ProfileNotFound) as error:
            raise InvalidArgument(f"{shown}: {error}", subject=shown) from error
        except exceptions.BotoCoreError as error:
            raise EngineUnreachable(f"{shown}: {error}", subject=shown) from error


def open_source(
    bucket: str, *, endpoint_url: str | None, region: str | None, profile: str | None, anonymous: bool, jobs: int
) -> S3Source:
    """Return a bucket of another store.  InvalidArgument without boto3, or for settings that it refuses."""
    try:
        import boto3
        from botocore import UNSIGNED, exceptions
        from botocore.config import Config
    except ImportError:
        raise InvalidArgument("lake import needs boto3; install it with: pip install 'boto3>=1.36'") from None
    settings: dict[str, Any] = {
        "retries": {"max_attempts": ATTEMPTS, "mode": "standard"},
        "max_pool_connections": jobs + 1,
        "response_checksum_validation": "when_required",
    }
    if anonymous:
        settings["signature_version"] = UNSIGNED
    if endpoint_url or any(os.environ.get(name) for name in _ENDPOINTS):
        settings["s3"] = {"addressing_style": "path"}
    try:
        session = boto3.Session(profile_name=profile, region_name=region)
        # A store of one's own has no regions, and boto3 refuses to sign without one.
        name = session.region_name or "us-east-1"
        client = session.client("s3", endpoint_url=endpoint_url, region_name=name, config=Config(**settings))
    except (exceptions.BotoCoreError, ValueError) as error:
        raise InvalidArgument(f"s3://{bucket}: {error}") from error
    return S3Source(client, bucket)


def _note_order(response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: Any) -> None:
    """Add the order in which a page has versions and delete markers: True for a marker.

    boto3 returns two lists, and times do not tell, because many stores have whole seconds.
    """
    order: list[bool] = []
    with contextlib.suppress(ElementTree.ParseError):  # then boto3 raises its own error
        for element in ElementTree.fromstring(response_dict["body"]):
            name = element.tag.rpartition("}")[2]
            if name in ("Version", "DeleteMarker"):
                order.append(name == "DeleteMarker")
    customized_response_dict[_ORDER] = order


def _found(each: dict[str, Any], *, is_marker: bool = False) -> Found:
    mtime_ns = int(each["LastModified"].timestamp() * 1000) * 1_000_000
    return Found(
        each["Key"],
        each.get("Size", 0),
        each.get("ETag", "").strip('"'),
        mtime_ns,
        each.get("VersionId", ""),
        is_marker,
    )


def _version(found: Found) -> dict[str, str]:
    return {"VersionId": found.version} if found.version else {}


def _as_lake_error(answer: dict[str, Any], bucket: str, shown: str) -> LakeError:
    code = str(answer.get("Error", {}).get("Code", ""))
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    message = answer.get("Error", {}).get("Message", "")
    if code == "NoSuchBucket":
        return BucketNotFound(f"s3://{bucket} does not exist", subject=f"s3://{bucket}")
    if code in _DENIED or status == 403:
        return PermissionDenied(f"{shown}: {code}: {message}", subject=shown)
    if code in _MISSING:
        return KeyNotFound(f"{shown} does not exist any more", subject=shown)
    if status == 412:
        return SourceChanged(f"{shown} changed since it was listed", subject=shown)
    return InvalidArgument(f"{shown}: {code}: {message}", subject=shown)
