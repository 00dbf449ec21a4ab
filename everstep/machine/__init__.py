"""What an agent does on its machine, and the client with which controllers talk to it.

Imports nothing: the shim is started from here and must start fast.
"""
