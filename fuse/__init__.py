"""The mount: operations for the kernel, open files, inodes, staging, and the service that runs one mount."""
