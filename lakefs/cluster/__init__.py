"""Places in a lake of many members: protection, failure domains, the ring, and the table of partitions' rows."""
