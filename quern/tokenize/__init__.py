"""Turns documents into uint16 and uint32 token shards that record the document of every token."""
