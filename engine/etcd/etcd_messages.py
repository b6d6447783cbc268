"""The messages of etcd's API (version 3) that are used here, with no field more than that.

Each line of `_MESSAGES` is a message: its fields, each with type, number and, for one of several that exclude each
other, the name of that choice.  Types and numbers are etcd's; names of messages are not sent, and are our own.  The
classes are made by protobuf's runtime from this table, in a pool of their own, so that another package with etcd's own
descriptors can be loaded beside it.

`tests/contract/test_coordinator.py` proves the table at a real etcd.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

Message = Any
"""A message of this table; protobuf's classes have no types that a checker sees."""

_PACKAGE: Final = "lake.etcd"
_MESSAGES: Final = {
    "Header": "cluster_id:uint64:1 member_id:uint64:2 revision:int64:3 raft_term:uint64:4",
    "KeyValue": "key:bytes:1 create_revision:int64:2 mod_revision:int64:3 version:int64:4 value:bytes:5 lease:int64:6",
    "RangeRequest": "key:bytes:1 range_end:bytes:2 limit:int64:3 revision:int64:4 serializable:bool:7 "
    "count_only:bool:9",
    "RangeResponse": "header:Header:1 kvs:*KeyValue:2 more:bool:3",
    "PutRequest": "key:bytes:1 value:bytes:2 lease:int64:3",
    "DeleteRequest": "key:bytes:1",
    "Operation": "range:RangeRequest:1:request put:PutRequest:2:request delete:DeleteRequest:3:request "
    "txn:TxnRequest:4:request",
    "Result": "range:RangeResponse:1:response txn:TxnResponse:4:response",
    "Compare": "result:int32:1 target:int32:2 key:bytes:3 version:int64:4:union mod_revision:int64:6:union "
    "value:bytes:7:union",
    "TxnRequest": "compare:*Compare:1 success:*Operation:2 failure:*Operation:3",
    "TxnResponse": "header:Header:1 succeeded:bool:2 responses:*Result:3",
    "CompactRequest": "revision:int64:1",
    "CompactResponse": "header:Header:1",
    "WatchRequest": "create:WatchCreate:1:request",
    "WatchCreate": "key:bytes:1 range_end:bytes:2 start_revision:int64:3 progress_notify:bool:4 fragment:bool:8",
    "WatchResponse": "header:Header:1 created:bool:3 canceled:bool:4 compact_revision:int64:5 cancel_reason:string:6 "
    "fragment:bool:7 events:*Event:11",
    "Event": "type:int32:1 kv:KeyValue:2",
    "GrantRequest": "ttl:int64:1 id:int64:2",
    "GrantResponse": "header:Header:1 id:int64:2 ttl:int64:3",
    "RevokeRequest": "id:int64:1",
    "RevokeResponse": "header:Header:1",
    "KeepAliveRequest": "id:int64:1",
    "KeepAliveResponse": "header:Header:1 id:int64:2 ttl:int64:3",
    "DefragmentRequest": "",
    "DefragmentResponse": "header:Header:1",
    "AlarmRequest": "action:int32:1 member_id:uint64:2 alarm:int32:3",
    "AlarmResponse": "header:Header:1 alarms:*MemberAlarm:2",
    "MemberAlarm": "member_id:uint64:1 alarm:int32:2",
    "AuthenticateRequest": "name:string:1 password:string:2",
    "AuthenticateResponse": "header:Header:1 token:string:2",
}
_F: Final = descriptor_pb2.FieldDescriptorProto


def _described() -> Any:
    """Return the description of all messages."""
    file = descriptor_pb2.FileDescriptorProto(name="lake_etcd.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        choices: dict[str, int] = {}
        for field in fields.split():
            _add_field(message, choices, *field.split(":"))
        for choice in choices:
            message.oneof_decl.add(name=choice)
    return file


def _add_field(message: Any, choices: dict[str, int], name: str, kind: str, number: str, choice: str = "") -> None:
    label = _F.LABEL_REPEATED if kind.startswith("*") else _F.LABEL_OPTIONAL
    kind = kind.removeprefix("*")
    field = message.field.add(name=name, number=int(number), label=label)
    if kind in _MESSAGES:
        field.type, field.type_name = _F.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    else:
        field.type = _F.Type.Value(f"TYPE_{kind.upper()}")
    if choice:
        field.oneof_index = choices.setdefault(choice, len(choices))


_POOL: Final = descriptor_pool.DescriptorPool()
_POOL.Add(_described())


def _class(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


RangeRequest: Final = _class("RangeRequest")
RangeResponse: Final = _class("RangeResponse")
PutRequest: Final = _class("PutRequest")
DeleteRequest: Final = _class("DeleteRequest")
EtcdOperation: Final = _class("Operation")
EtcdCompare: Final = _class("Compare")
TxnRequest: Final = _class("TxnRequest")
TxnResponse: Final = _class("TxnResponse")
CompactRequest: Final = _class("CompactRequest")
CompactResponse: Final = _class("CompactResponse")
WatchRequest: Final = _class("WatchRequest")
WatchCreate: Final = _class("WatchCreate")
WatchResponse: Final = _class("WatchResponse")
GrantRequest: Final = _class("GrantRequest")
GrantResponse: Final = _class("GrantResponse")
RevokeRequest: Final = _class("RevokeRequest")
RevokeResponse: Final = _class("RevokeResponse")
KeepAliveRequest: Final = _class("KeepAliveRequest")
KeepAliveResponse: Final = _class("KeepAliveResponse")
DefragmentRequest: Final = _class("DefragmentRequest")
DefragmentResponse: Final = _class("DefragmentResponse")
AlarmRequest: Final = _class("AlarmRequest")
AlarmResponse: Final = _class("AlarmResponse")
AuthenticateRequest: Final = _class("AuthenticateRequest")
AuthenticateResponse: Final = _class("AuthenticateResponse")

EQUAL: Final = 0
VERSION, MOD_REVISION, VALUE = 0, 2, 3
"""Targets of a comparison: how often a key was put since it exists, the revision that put it, its value."""
DISARM: Final = 2
"""The action of a request that ends an alarm; 0 lists them."""
NO_SPACE: Final = 1
IS_DELETED: Final = 1
"""The type of an event that removed a key."""
