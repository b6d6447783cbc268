"""Native reads of shared content: where the bytes of a chunk lie, and granules of them, each checked.

In C, `extent.h` compares shared content with its checksums.  Two checks stand elsewhere: of runs of short chunks, which
one call reads (`lakefs/grants/checked_reads.h`), and of single pages of a granule that was right
(`fuse/native/content.h`).
"""
