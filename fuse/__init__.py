"""The mount: operations for the kernel, open files, inodes, staging, and the service that runs one mount."""

from fuse.native import layer as layer  # before pyfuse3, whose calls of libfuse it takes
