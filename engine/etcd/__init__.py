"""The coordinator of a lake on etcd: a thin client over gRPC, and the port `Coordinator` on it."""
