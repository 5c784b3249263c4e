"""Front, and the threads and processes that the engine runs in."""
