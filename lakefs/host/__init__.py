"""Linux facilities for clients: page cache, mappings, advice, descriptors, threads, forks, CRC."""
