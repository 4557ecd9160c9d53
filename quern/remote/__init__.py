"""Access to object stores and web servers: error classification, retries, and whole objects only.

Everything that goes over a network to a file goes through here; :mod:`quern.storage` is the door.
"""
