"""The command line: a client of the socket that also starts engines."""
