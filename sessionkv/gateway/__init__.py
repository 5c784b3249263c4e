"""The APIs that agents and chat apps already speak, over HTTP.

A client of the engine's socket like any other: it loads no model, sees no block and opens no store.
"""
