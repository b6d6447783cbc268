"""What Linux gives a client: page cache, mappings, advice, descriptors, threads, forks, CRC."""
