"""The decisions of the KV cache, over ids alone: blocks, prefixes, sessions, retention."""
