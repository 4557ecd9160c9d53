"""Documents to uint16 and uint32 token shards in which every token knows its document."""
