"""Clients of the socket, blocking and asynchronous, over one core without I/O."""
