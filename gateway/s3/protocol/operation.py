"""S3's names of its operations, and the sub-resources (`?policy`, `?cors`) that most of them are asked of.  Pure.

`gateway.s3.protocol.targets` finds a request's operation.  Those in NOT_OFFERED are answered with 501; they are named
all the same, so that counts and the access log show what was asked for.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


class Operation(enum.Enum):
    """S3's names of operations: those that are answered here, and those whose refusal is counted under their name."""

    LIST_BUCKETS = "ListBuckets"
    CREATE_BUCKET = "CreateBucket"
    DELETE_BUCKET = "DeleteBucket"
    HEAD_BUCKET = "HeadBucket"
    GET_BUCKET_LOCATION = "GetBucketLocation"
    GET_BUCKET_VERSIONING = "GetBucketVersioning"
    PUT_BUCKET_VERSIONING = "PutBucketVersioning"
    LIST_OBJECTS = "ListObjects"
    LIST_OBJECTS_V2 = "ListObjectsV2"
    LIST_OBJECT_VERSIONS = "ListObjectVersions"
    LIST_MULTIPART_UPLOADS = "ListMultipartUploads"
    DELETE_OBJECTS = "DeleteObjects"
    GET_OBJECT = "GetObject"
    HEAD_OBJECT = "HeadObject"
    PUT_OBJECT = "PutObject"
    COPY_OBJECT = "CopyObject"
    DELETE_OBJECT = "DeleteObject"
    GET_OBJECT_ATTRIBUTES = "GetObjectAttributes"
    GET_OBJECT_TAGGING = "GetObjectTagging"
    PUT_OBJECT_TAGGING = "PutObjectTagging"
    DELETE_OBJECT_TAGGING = "DeleteObjectTagging"
    CREATE_MULTIPART_UPLOAD = "CreateMultipartUpload"
    UPLOAD_PART = "UploadPart"
    UPLOAD_PART_COPY = "UploadPartCopy"
    COMPLETE_MULTIPART_UPLOAD = "CompleteMultipartUpload"
    ABORT_MULTIPART_UPLOAD = "AbortMultipartUpload"
    LIST_PARTS = "ListParts"
    DELETE_BUCKET_ANALYTICS_CONFIGURATION = "DeleteBucketAnalyticsConfiguration"
    DELETE_BUCKET_CORS = "DeleteBucketCors"
    DELETE_BUCKET_ENCRYPTION = "DeleteBucketEncryption"
    DELETE_BUCKET_INTELLIGENT_TIERING_CONFIGURATION = "DeleteBucketIntelligentTieringConfiguration"
    DELETE_BUCKET_INVENTORY_CONFIGURATION = "DeleteBucketInventoryConfiguration"
    DELETE_BUCKET_LIFECYCLE = "DeleteBucketLifecycle"
    DELETE_BUCKET_METRICS_CONFIGURATION = "DeleteBucketMetricsConfiguration"
    DELETE_BUCKET_OWNERSHIP_CONTROLS = "DeleteBucketOwnershipControls"
    DELETE_BUCKET_POLICY = "DeleteBucketPolicy"
    DELETE_BUCKET_REPLICATION = "DeleteBucketReplication"
    DELETE_BUCKET_TAGGING = "DeleteBucketTagging"
    DELETE_BUCKET_WEBSITE = "DeleteBucketWebsite"
    DELETE_PUBLIC_ACCESS_BLOCK = "DeletePublicAccessBlock"
    GET_BUCKET_ACCELERATE_CONFIGURATION = "GetBucketAccelerateConfiguration"
    GET_BUCKET_ACL = "GetBucketAcl"
    GET_BUCKET_ANALYTICS_CONFIGURATION = "GetBucketAnalyticsConfiguration"
    GET_BUCKET_CORS = "GetBucketCors"
    GET_BUCKET_ENCRYPTION = "GetBucketEncryption"
    GET_BUCKET_INTELLIGENT_TIERING_CONFIGURATION = "GetBucketIntelligentTieringConfiguration"
    GET_BUCKET_INVENTORY_CONFIGURATION = "GetBucketInventoryConfiguration"
    GET_BUCKET_LIFECYCLE_CONFIGURATION = "GetBucketLifecycleConfiguration"
    GET_BUCKET_LOGGING = "GetBucketLogging"
    GET_BUCKET_METRICS_CONFIGURATION = "GetBucketMetricsConfiguration"
    GET_BUCKET_NOTIFICATION_CONFIGURATION = "GetBucketNotificationConfiguration"
    GET_BUCKET_OWNERSHIP_CONTROLS = "GetBucketOwnershipControls"
    GET_BUCKET_POLICY = "GetBucketPolicy"
    GET_BUCKET_POLICY_STATUS = "GetBucketPolicyStatus"
    GET_BUCKET_REPLICATION = "GetBucketReplication"
    GET_BUCKET_REQUEST_PAYMENT = "GetBucketRequestPayment"
    GET_BUCKET_TAGGING = "GetBucketTagging"
    GET_BUCKET_WEBSITE = "GetBucketWebsite"
    GET_OBJECT_ACL = "GetObjectAcl"
    GET_OBJECT_LEGAL_HOLD = "GetObjectLegalHold"
    GET_OBJECT_LOCK_CONFIGURATION = "GetObjectLockConfiguration"
    GET_OBJECT_RETENTION = "GetObjectRetention"
    GET_OBJECT_TORRENT = "GetObjectTorrent"
    GET_PUBLIC_ACCESS_BLOCK = "GetPublicAccessBlock"
    LIST_BUCKET_ANALYTICS_CONFIGURATIONS = "ListBucketAnalyticsConfigurations"
    LIST_BUCKET_INTELLIGENT_TIERING_CONFIGURATIONS = "ListBucketIntelligentTieringConfigurations"
    LIST_BUCKET_INVENTORY_CONFIGURATIONS = "ListBucketInventoryConfigurations"
    LIST_BUCKET_METRICS_CONFIGURATIONS = "ListBucketMetricsConfigurations"
    OPTIONS_OBJECT = "OptionsObject"
    PUT_BUCKET_ACCELERATE_CONFIGURATION = "PutBucketAccelerateConfiguration"
    PUT_BUCKET_ACL = "PutBucketAcl"
    PUT_BUCKET_ANALYTICS_CONFIGURATION = "PutBucketAnalyticsConfiguration"
    PUT_BUCKET_CORS = "PutBucketCors"
    PUT_BUCKET_ENCRYPTION = "PutBucketEncryption"
    PUT_BUCKET_INTELLIGENT_TIERING_CONFIGURATION = "PutBucketIntelligentTieringConfiguration"
    PUT_BUCKET_INVENTORY_CONFIGURATION = "PutBucketInventoryConfiguration"
    PUT_BUCKET_LIFECYCLE_CONFIGURATION = "PutBucketLifecycleConfiguration"
    PUT_BUCKET_LOGGING = "PutBucketLogging"
    PUT_BUCKET_METRICS_CONFIGURATION = "PutBucketMetricsConfiguration"
    PUT_BUCKET_NOTIFICATION_CONFIGURATION = "PutBucketNotificationConfiguration"
    PUT_BUCKET_OWNERSHIP_CONTROLS = "PutBucketOwnershipControls"
    PUT_BUCKET_POLICY = "PutBucketPolicy"
    PUT_BUCKET_REPLICATION = "PutBucketReplication"
    PUT_BUCKET_REQUEST_PAYMENT = "PutBucketRequestPayment"
    PUT_BUCKET_TAGGING = "PutBucketTagging"
    PUT_BUCKET_WEBSITE = "PutBucketWebsite"
    PUT_OBJECT_ACL = "PutObjectAcl"
    PUT_OBJECT_LEGAL_HOLD = "PutObjectLegalHold"
    PUT_OBJECT_LOCK_CONFIGURATION = "PutObjectLockConfiguration"
    PUT_OBJECT_RETENTION = "PutObjectRetention"
    PUT_PUBLIC_ACCESS_BLOCK = "PutPublicAccessBlock"
    RENAME_OBJECT = "RenameObject"
    RESTORE_OBJECT = "RestoreObject"
    SELECT_OBJECT_CONTENT = "SelectObjectContent"


class Level(enum.Enum):
    """The kind of thing that a request is about."""

    SERVICE = "the service"
    BUCKET = "a bucket"
    OBJECT = "an object"


_OF_BUCKETS: Final[Mapping[str, tuple[Operation, ...]]] = {
    "accelerate": (Operation.GET_BUCKET_ACCELERATE_CONFIGURATION, Operation.PUT_BUCKET_ACCELERATE_CONFIGURATION),
    "acl": (Operation.GET_BUCKET_ACL, Operation.PUT_BUCKET_ACL),
    "analytics": (
        Operation.LIST_BUCKET_ANALYTICS_CONFIGURATIONS,
        Operation.PUT_BUCKET_ANALYTICS_CONFIGURATION,
        Operation.DELETE_BUCKET_ANALYTICS_CONFIGURATION,
    ),
    "cors": (Operation.GET_BUCKET_CORS, Operation.PUT_BUCKET_CORS, Operation.DELETE_BUCKET_CORS),
    "encryption": (
        Operation.GET_BUCKET_ENCRYPTION,
        Operation.PUT_BUCKET_ENCRYPTION,
        Operation.DELETE_BUCKET_ENCRYPTION,
    ),
    "intelligent-tiering": (
        Operation.LIST_BUCKET_INTELLIGENT_TIERING_CONFIGURATIONS,
        Operation.PUT_BUCKET_INTELLIGENT_TIERING_CONFIGURATION,
        Operation.DELETE_BUCKET_INTELLIGENT_TIERING_CONFIGURATION,
    ),
    "inventory": (
        Operation.LIST_BUCKET_INVENTORY_CONFIGURATIONS,
        Operation.PUT_BUCKET_INVENTORY_CONFIGURATION,
        Operation.DELETE_BUCKET_INVENTORY_CONFIGURATION,
    ),
    "lifecycle": (
        Operation.GET_BUCKET_LIFECYCLE_CONFIGURATION,
        Operation.PUT_BUCKET_LIFECYCLE_CONFIGURATION,
        Operation.DELETE_BUCKET_LIFECYCLE,
    ),
    "logging": (Operation.GET_BUCKET_LOGGING, Operation.PUT_BUCKET_LOGGING),
    "metrics": (
        Operation.LIST_BUCKET_METRICS_CONFIGURATIONS,
        Operation.PUT_BUCKET_METRICS_CONFIGURATION,
        Operation.DELETE_BUCKET_METRICS_CONFIGURATION,
    ),
    "notification": (Operation.GET_BUCKET_NOTIFICATION_CONFIGURATION, Operation.PUT_BUCKET_NOTIFICATION_CONFIGURATION),
    "object-lock": (Operation.GET_OBJECT_LOCK_CONFIGURATION, Operation.PUT_OBJECT_LOCK_CONFIGURATION),
    "ownershipControls": (
        Operation.GET_BUCKET_OWNERSHIP_CONTROLS,
        Operation.PUT_BUCKET_OWNERSHIP_CONTROLS,
        Operation.DELETE_BUCKET_OWNERSHIP_CONTROLS,
    ),
    "policy": (Operation.GET_BUCKET_POLICY, Operation.PUT_BUCKET_POLICY, Operation.DELETE_BUCKET_POLICY),
    "policyStatus": (Operation.GET_BUCKET_POLICY_STATUS,),
    "publicAccessBlock": (
        Operation.GET_PUBLIC_ACCESS_BLOCK,
        Operation.PUT_PUBLIC_ACCESS_BLOCK,
        Operation.DELETE_PUBLIC_ACCESS_BLOCK,
    ),
    "replication": (
        Operation.GET_BUCKET_REPLICATION,
        Operation.PUT_BUCKET_REPLICATION,
        Operation.DELETE_BUCKET_REPLICATION,
    ),
    "requestPayment": (Operation.GET_BUCKET_REQUEST_PAYMENT, Operation.PUT_BUCKET_REQUEST_PAYMENT),
    "tagging": (Operation.GET_BUCKET_TAGGING, Operation.PUT_BUCKET_TAGGING, Operation.DELETE_BUCKET_TAGGING),
    "website": (Operation.GET_BUCKET_WEBSITE, Operation.PUT_BUCKET_WEBSITE, Operation.DELETE_BUCKET_WEBSITE),
}
_OF_OBJECTS: Final[Mapping[str, tuple[Operation, ...]]] = {
    "acl": (Operation.GET_OBJECT_ACL, Operation.PUT_OBJECT_ACL),
    "legal-hold": (Operation.GET_OBJECT_LEGAL_HOLD, Operation.PUT_OBJECT_LEGAL_HOLD),
    "renameObject": (Operation.RENAME_OBJECT,),
    "restore": (Operation.RESTORE_OBJECT,),
    "retention": (Operation.GET_OBJECT_RETENTION, Operation.PUT_OBJECT_RETENTION),
    "select": (Operation.SELECT_OBJECT_CONTENT,),
    "torrent": (Operation.GET_OBJECT_TORRENT,),
}
_METHODS: Final = {
    "Delete": "DELETE",
    "Get": "GET",
    "List": "GET",
    "Put": "PUT",
    "Rename": "PUT",
    "Restore": "POST",
    "Select": "POST",
}


def _method_of(operation: Operation) -> str:
    """Return the method that asks for an operation of a sub-resource; its name begins with a verb."""
    return next(method for verb, method in _METHODS.items() if operation.value.startswith(verb))


def _by_method(operations: tuple[Operation, ...]) -> dict[str, Operation]:
    return {_method_of(operation): operation for operation in operations}


SUB_RESOURCES: Final[Mapping[Level, Mapping[str, Mapping[str, Operation]]]] = {
    Level.SERVICE: {},
    Level.BUCKET: {name: _by_method(operations) for name, operations in _OF_BUCKETS.items()},
    Level.OBJECT: {name: _by_method(operations) for name, operations in _OF_OBJECTS.items()},
}
"""The operations of each sub-resource, by level, its name, and method."""
BY_ID: Final[Mapping[Operation, Operation]] = {
    Operation.LIST_BUCKET_ANALYTICS_CONFIGURATIONS: Operation.GET_BUCKET_ANALYTICS_CONFIGURATION,
    Operation.LIST_BUCKET_INTELLIGENT_TIERING_CONFIGURATIONS: Operation.GET_BUCKET_INTELLIGENT_TIERING_CONFIGURATION,
    Operation.LIST_BUCKET_INVENTORY_CONFIGURATIONS: Operation.GET_BUCKET_INVENTORY_CONFIGURATION,
    Operation.LIST_BUCKET_METRICS_CONFIGURATIONS: Operation.GET_BUCKET_METRICS_CONFIGURATION,
}
"""The operation in the place of a list, if the parameter `id` names one of its entries."""
NOT_OFFERED: Final = frozenset(
    operation
    for operations in (*_OF_BUCKETS.values(), *_OF_OBJECTS.values())
    for operation in operations
    if _method_of(operation) in ("PUT", "POST")
) - {Operation.PUT_BUCKET_CORS, Operation.PUT_BUCKET_TAGGING} | {Operation.GET_OBJECT_TORRENT}
"""Operations that are refused: to set what is not kept here, and what no object has."""
