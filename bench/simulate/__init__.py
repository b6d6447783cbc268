"""Lakes of more machines than there are here: the product's own tables and decisions over modelled disks and links."""
