"""Hot files: checked content in memory that the kernel reads without the mount."""
