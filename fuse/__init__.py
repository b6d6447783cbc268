"""The mount: operations of the kernel, what is open, and one mount put together."""
