"""Processes and threads: the front, the serving engine, private engines and the embedded one."""
