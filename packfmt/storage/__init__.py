"""Where records live: mapped shards, LMDB, and a set of shards opened as one."""
